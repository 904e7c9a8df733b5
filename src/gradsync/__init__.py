"""gradsync: gradient synchronisation for training loops on NumPy and CuPy arrays.

gradsync loads each public name on first use. So `import gradsync` is fast, and imports neither cupy nor multiprocessing
nor msgpack.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradsync import comm as comm
    from gradsync import hooks as hooks
    from gradsync.bucketing.callback import AllreduceCallback as AllreduceCallback
    from gradsync.bucketing.callback import make_allreduce_cb as make_allreduce_cb
    from gradsync.bucketing.lists import bcast_list_ as bcast_list_
    from gradsync.bucketing.lists import get_offsets as get_offsets
    from gradsync.bucketing.lists import pack_allreduce_split as pack_allreduce_split
    from gradsync.bucketing.lists import param_pack_concat as param_pack_concat
    from gradsync.bucketing.lists import param_pack_split as param_pack_split
    from gradsync.bucketing.trees import average_gradients as average_gradients
    from gradsync.bucketing.trees import broadcast_tree as broadcast_tree
    from gradsync.communicators.communicator import Communicator as Communicator
    from gradsync.communicators.groups import NonMember as NonMember
    from gradsync.consistency import check_consistency as check_consistency
    from gradsync.diagnostics.triggers import dump_flight_recorder as dump_flight_recorder
    from gradsync.diagnostics.triggers import trace as trace
    from gradsync.environment import is_launched as is_launched
    from gradsync.errors import AuthenticationError as AuthenticationError
    from gradsync.errors import BackendUnavailable as BackendUnavailable
    from gradsync.errors import CollectiveTimeout as CollectiveTimeout
    from gradsync.errors import CommunicatorClosed as CommunicatorClosed
    from gradsync.errors import FutureNotReady as FutureNotReady
    from gradsync.errors import GradientCancelled as GradientCancelled
    from gradsync.errors import GradientChanged as GradientChanged
    from gradsync.errors import GradsyncError as GradsyncError
    from gradsync.errors import InvalidArgument as InvalidArgument
    from gradsync.errors import MissingGradient as MissingGradient
    from gradsync.errors import MpiError as MpiError
    from gradsync.errors import NcclError as NcclError
    from gradsync.errors import NonFiniteGradient as NonFiniteGradient
    from gradsync.errors import PlanMismatch as PlanMismatch
    from gradsync.errors import RankFailed as RankFailed
    from gradsync.errors import RendezvousError as RendezvousError
    from gradsync.errors import RendezvousTimeout as RendezvousTimeout
    from gradsync.errors import UnsupportedDtype as UnsupportedDtype
    from gradsync.futures import CollectiveFuture as CollectiveFuture
    from gradsync.futures import GradientFuture as GradientFuture
    from gradsync.launching.free_port import free_port as free_port
    from gradsync.launching.launch import MainProcessError as MainProcessError
    from gradsync.launching.launch import WorkerError as WorkerError
    from gradsync.launching.launch import launch as launch
    from gradsync.launching.launch import set_start_method as set_start_method
    from gradsync.launching.launcher import launcher as launcher
    from gradsync.launching.spawn import MultiprocessContext as MultiprocessContext
    from gradsync.launching.spawn import spawn as spawn
    from gradsync.process_group import destroy_process_group as destroy_process_group
    from gradsync.process_group import get_communicator as get_communicator
    from gradsync.process_group import group_barrier as group_barrier
    from gradsync.process_group import init_process_group as init_process_group
    from gradsync.process_group import is_distributed as is_distributed
    from gradsync.process_group import is_initialized as is_initialized
    from gradsync.process_group import new_group as new_group
    from gradsync.process_group import override_backend as override_backend
    from gradsync.process_group import synchronized as synchronized
    from gradsync.reduction import ReduceOp as ReduceOp
    from gradsync.sharding import shard_indices as shard_indices

    # The world's communicator. It exists only between init_process_group() and destroy_process_group().
    WORLD: Communicator

__version__ = "0.2.0"

# Module -> the public names that it defines.
_NAMES = {
    "gradsync.bucketing.callback": ("AllreduceCallback", "make_allreduce_cb"),
    "gradsync.bucketing.lists": (
        "bcast_list_",
        "get_offsets",
        "pack_allreduce_split",
        "param_pack_concat",
        "param_pack_split",
    ),
    "gradsync.bucketing.trees": ("average_gradients", "broadcast_tree"),
    "gradsync.communicators.communicator": ("Communicator",),
    "gradsync.communicators.groups": ("NonMember",),
    "gradsync.consistency": ("check_consistency",),
    "gradsync.diagnostics.triggers": ("dump_flight_recorder", "trace"),
    "gradsync.environment": ("is_launched",),
    "gradsync.errors": (
        "AuthenticationError",
        "BackendUnavailable",
        "CollectiveTimeout",
        "CommunicatorClosed",
        "FutureNotReady",
        "GradientCancelled",
        "GradientChanged",
        "GradsyncError",
        "InvalidArgument",
        "MissingGradient",
        "MpiError",
        "NcclError",
        "NonFiniteGradient",
        "PlanMismatch",
        "RankFailed",
        "RendezvousError",
        "RendezvousTimeout",
        "UnsupportedDtype",
    ),
    "gradsync.futures": ("CollectiveFuture", "GradientFuture"),
    "gradsync.launching.free_port": ("free_port",),
    "gradsync.launching.launch": ("launch", "MainProcessError", "WorkerError", "set_start_method"),
    "gradsync.launching.launcher": ("launcher",),
    "gradsync.launching.spawn": ("MultiprocessContext", "spawn"),
    "gradsync.process_group": (
        "destroy_process_group",
        "get_communicator",
        "group_barrier",
        "init_process_group",
        "is_distributed",
        "is_initialized",
        "new_group",
        "override_backend",
        "synchronized",
    ),
    "gradsync.reduction": ("ReduceOp",),
    "gradsync.sharding": ("shard_indices",),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}

# Name of torch.distributed or of its users -> what to use instead, for the error. docs/coming_from/ddp.md has them too.
_FOREIGN = {
    "get_rank": "gs.get_communicator().rank",
    "get_world_size": "gs.get_communicator().world_size",
    "all_reduce": "gs.get_communicator().all_reduce(...)",
    "broadcast": "gs.get_communicator().broadcast(...)",
    "barrier": "gs.get_communicator().barrier()",
    "DistributedDataParallel": "gradsync.adapters.torch.Synchronised(model), or gs.AllreduceCallback in your own loop",
    "DistributedSampler": "gs.shard_indices(len(data), epoch)",
    "clip_grad_norm_": 'gs.AllreduceCallback("mean", clip_norm=1.0)',
    "no_sync": "accumulate() of a gs.AllreduceCallback",
    "Join": "join() of a gs.AllreduceCallback",
}

_MODULES = ("comm", "hooks")

# WORLD is not in this list, because it exists only while there is a process group.
__all__ = ["__version__", *_MODULES, *_HOME]


def _load(name: str) -> object:
    if sys.platform == "win32" and name in __all__:
        raise ImportError(f"gradsync.{name} is not for Windows: use gradsync in WSL 2, which is Linux (wsl --install)")
    if name == "WORLD":
        from gradsync import process_group

        return process_group.world_attribute()
    if name in _MODULES:
        return importlib.import_module(f"gradsync.{name}")
    home = _HOME.get(name)
    if home is None:
        from gradsync.arguments import did_you_mean

        advice = "" if name.startswith("_") else did_you_mean(name, __all__, _FOREIGN)
        raise AttributeError(f"module 'gradsync' has no attribute {name!r}{advice}")
    value: object = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


if not TYPE_CHECKING:  # hidden from type checkers, which would otherwise accept any name
    __getattr__ = _load


def __dir__() -> list[str]:
    return sorted(__all__)
