"""gradsync: gradient synchronisation for training loops on NumPy and CuPy arrays.

gradsync loads each public name on first use. So `import gradsync` is fast, and imports neither cupy nor multiprocessing
nor msgpack. The file __init__.pyi lists the public names for type checkers, and for this module.
"""

from __future__ import annotations

import importlib
import os
import sys

__version__ = "0.3.0"


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
        from gradsync.words import is_import_from, no_attribute, no_name

        if is_import_from(sys._getframe(1)):
            no_name(name, __all__)
        no_attribute("gradsync", "module 'gradsync'", name, __all__)
    value: object = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
