"""gradsync: gradient synchronisation for training loops on NumPy and CuPy arrays.

gradsync loads each public name on first use. So `import gradsync` is fast, and imports neither cupy nor multiprocessing
nor msgpack. The file __init__.pyi lists the public names for type checkers, and for this module.
"""

from __future__ import annotations

import importlib
import os
import sys

__version__ = "0.3.0.dev0"

# For the error of an unknown name: a name of PyTorch -> gradsync's code for the same purpose.
_FOREIGN = {
    "get_rank": "gs.get_communicator().rank",
    "get_world_size": "gs.get_communicator().world_size",
    "all_reduce": "gs.get_communicator().all_reduce(...)",
    "broadcast": "gs.get_communicator().broadcast(...)",
    "barrier": "gs.get_communicator().barrier()",
    "DistributedDataParallel": "gs.AllreduceCallback and a hook of each parameter (examples/torch_loop.py)",
    "DistributedSampler": "gs.shard_indices(len(data), epoch)",
    "clip_grad_norm_": 'gs.AllreduceCallback("mean", clip_norm=1.0)',
    "no_sync": "arrays of your own to add gradients up in, and hand over each sum once",
    "Join": 'gs.AllreduceCallback("sum"), with the number of samples as one more gradient (docs/uneven.md)',
}


def _read_homes() -> dict[str, str]:
    """Returns the public names, each with the module from which __init__.pyi imports the name."""
    stub = __spec__.loader.get_data(os.path.join(os.path.dirname(__file__), "__init__.pyi")).decode()
    imports = [line.split() for line in stub.splitlines() if line.startswith("from ")]
    return {name: home for _, home, _, name, *_ in imports}


_HOMES = _read_homes()

# WORLD is not in this list, because it exists only while there is a process group.
__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> object:
    if sys.platform == "win32" and name in __all__:
        raise ImportError(f"gradsync.{name} is not for Windows: use gradsync in WSL 2, which is Linux (wsl --install)")
    if name == "WORLD":
        from gradsync import process_group

        return process_group.world_attribute()
    home = _HOMES.get(name)
    if home == "gradsync":  # a module
        return importlib.import_module(f"gradsync.{name}")
    if home is None:
        from gradsync.arguments import did_you_mean
        from gradsync.removed import no_attribute

        advice = "" if name.startswith("_") else did_you_mean(name, __all__, _FOREIGN)
        no_attribute("gradsync", "module 'gradsync'", name, advice)
    value: object = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
