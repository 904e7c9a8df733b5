"""gradsync: gradient synchronisation for training loops on NumPy and CuPy arrays.

Public names load on first use, so that `import gradsync` costs next to nothing and imports neither cupy nor
multiprocessing nor msgpack.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

# Public name -> the module that defines it.
_HOME = {
    "AllreduceCallback": "gradsync.bucketing.callback",
    "make_allreduce_cb": "gradsync.bucketing.callback",
    "bcast_list_": "gradsync.bucketing.parameters",
    "get_offsets": "gradsync.bucketing.flat_buffer",
    "param_pack_concat": "gradsync.bucketing.flat_buffer",
    "param_pack_split": "gradsync.bucketing.flat_buffer",
    "pack_allreduce_split": "gradsync.bucketing.parameters",
    "GradientFuture": "gradsync.bucketing.future",
    "Communicator": "gradsync.communicators.base",
    "init_process_group": "gradsync.process_group",
    "destroy_process_group": "gradsync.process_group",
    "is_initialized": "gradsync.process_group",
    "get_communicator": "gradsync.process_group",
    "is_distributed": "gradsync.process_group",
    "group_barrier": "gradsync.process_group",
    "WORLD": "gradsync.process_group",
    "launch": "gradsync.launching.launch",
    "WorkerError": "gradsync.launching.launch",
    "MainProcessError": "gradsync.launching.launch",
    "launcher": "gradsync.launching.launcher",
    **dict.fromkeys(
        (
            "GradsyncError",
            "InvalidArgument",
            "UnsupportedDtype",
            "BackendUnavailable",
            "RendezvousError",
            "RendezvousTimeout",
            "AuthenticationError",
            "PlanMismatch",
            "CollectiveTimeout",
            "RankFailed",
            "CommunicatorClosed",
            "NcclError",
            "NonFiniteGradient",
            "FutureNotReady",
            "GradientCancelled",
        ),
        "gradsync.errors",
    ),
}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'gradsync' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    if name != "WORLD":  # changes with every init and destroy
        globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
