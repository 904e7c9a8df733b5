"""CUDA as CuPy shows it. cupy.cuda.nccl is imported on its own, as in CuPy 14."""

from . import _driver as _driver
from . import memory as memory
from . import runtime as runtime
from . import stream as stream
from ._devices import Device as Device
from .memory import alloc as alloc
from .memory import alloc_pinned_memory as alloc_pinned_memory
from .stream import Event as Event
from .stream import Stream as Stream
from .stream import get_current_stream as get_current_stream
from .stream import get_elapsed_time as get_elapsed_time
