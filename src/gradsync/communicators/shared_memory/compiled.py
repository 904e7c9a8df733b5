"""The kernels in C, if they were built: setup.py compiles _kernels.c where there is a compiler."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

from gradsync.environment import PLAIN_KERNELS

#: The version of what memory.py, plain.py and _kernels.c have in common: the layout of the memory, how ranks use it,
#: and the functions in C. Whoever changes any of this raises it, here and in _kernels.c.
LAYOUT_VERSION = 4


class Kernels(NamedTuple):
    """The kernels that a process runs.

    Attributes:
        kind: "C" or "NumPy".
        layout: the version of their layout.
        file: where they are.
        why_plain: why they are not those in C; "" if they are.
        remedy: what to do about that.
    """

    kind: str
    layout: int
    file: str
    why_plain: str = ""
    remedy: str = ""

    def __str__(self) -> str:
        return f"those in {self.kind} with layout {self.layout} ({self.file})"


_NAME = "gradsync.communicators.shared_memory._kernels"
_BUILD = "install a C compiler, such as gcc, and Python's headers; then install gradsync again, with pip install ."


def _load() -> tuple[Any, Kernels]:
    """Returns the module in C, or None, and which kernels run.

    Raises:
        ImportError: the module was built from another version of gradsync.
    """
    plain = Kernels("NumPy", LAYOUT_VERSION, __file__)
    if PLAIN_KERNELS.read():
        return None, plain._replace(why_plain=f"{PLAIN_KERNELS}=1 asks for it", remedy=f"unset {PLAIN_KERNELS}")
    try:
        found = import_module(_NAME)
    except ModuleNotFoundError:
        return None, plain._replace(why_plain="the kernels in C were not built", remedy=_BUILD)
    except (ImportError, SystemError) as error:  # the latter: a free-threaded Python, and a file for the others
        return None, plain._replace(why_plain=f"the kernels in C cannot be loaded ({error})", remedy=_BUILD)
    version = getattr(found, "LAYOUT_VERSION", None)
    if version != LAYOUT_VERSION:
        raise ImportError(
            f"{found.__file__} was built from another version of gradsync (its layout is {version}, and that of "
            f"{__file__} is {LAYOUT_VERSION}): install gradsync again (pip install -e . in a clone); if there is no C "
            "compiler, delete the first file"
        )
    return found, Kernels("C", LAYOUT_VERSION, str(found.__file__))


#: The module in C, or None; and the kernels of this process.
compiled, RUNNING = _load()


def _no_fence() -> None:
    """Does nothing. Without C shared memory runs on x86-64 only, which keeps the order by itself."""


#: What this thread has read and written before a fence comes before what it writes after it, and what it reads.
fence: Callable[[], None] = _no_fence if compiled is None else compiled.fence
