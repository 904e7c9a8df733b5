"""NVIDIA's run-time compiler by ctypes: CUDA source compiles without a GPU, by the nvidia-cuda-nvrtc-cu12 wheel.

It runs in a process of its own, one for each compilation: in its own process it makes calls go on after a signal
(SA_RESTART), where Python's handlers count on their being interrupted.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

WHEEL = "nvidia-cuda-nvrtc-cu12"
_TIMEOUT_SECONDS = 100.0
# Said about the target, whatever the source.
_OLD_TARGET = re.compile(r"^nvrtc: warning: Architectures prior to .* are deprecated.*$", re.MULTILINE)


class NvrtcMissing(Exception):
    """The wheel is not installed, or its library does not load; says which."""


class CompileError(Exception):
    """The source does not compile; holds the compiler's log."""


class Compiled(NamedTuple):
    image: bytes  # CUBIN for a real architecture (sm_90), PTX for a virtual one (compute_90)
    diagnostics: str  # warnings and remarks about the source; empty when there are none


def find_library() -> Path:
    try:
        files = importlib.metadata.files(WHEEL)
    except importlib.metadata.PackageNotFoundError:
        raise NvrtcMissing(f"{WHEEL} is not installed") from None
    for file in files or ():
        if re.fullmatch(r"libnvrtc\.so\.\d+", file.name):
            return Path(str(file.locate()))
    raise NvrtcMissing(f"{WHEEL} holds no libnvrtc.so")


class Nvrtc:
    """The compiler, in other processes.

    Raises:
        NvrtcMissing: there is none.
    """

    def __init__(self) -> None:
        #: Compute capabilities: 90 stands for 9.0.
        self.supported_architectures: list[int] = _call("supported_architectures")

    def compile(self, source: str, architecture: str, options: tuple[str, ...] = ()) -> Compiled:
        compiled: Compiled = _call("compile", source, architecture, options)
        return compiled


def _call(method: str, *arguments: Any) -> Any:
    """Calls a method of the library in a new process, which ends with the call."""
    command = [sys.executable, "-c", "import nvrtc; nvrtc._answer()"]
    asked = pickle.dumps((method, arguments))
    here = Path(__file__).parent
    done = subprocess.run(command, input=asked, capture_output=True, timeout=_TIMEOUT_SECONDS, cwd=here)
    assert done.returncode == 0, done.stderr.decode()
    answer = pickle.loads(done.stdout)
    if isinstance(answer, Exception):
        raise answer
    return answer


def _answer() -> None:
    method, arguments = pickle.load(sys.stdin.buffer)
    try:
        answer = getattr(_Library(), method)(*arguments)
    except (NvrtcMissing, CompileError) as error:
        answer = error
    pickle.dump(answer, sys.stdout.buffer)


class _Library:
    def __init__(self) -> None:
        path = find_library()
        try:
            self._library = ctypes.CDLL(str(path))
        except OSError as error:
            raise NvrtcMissing(f"{path} does not load: {error}") from error
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p

    def supported_architectures(self) -> list[int]:
        count = ctypes.c_int()
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        architectures = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", architectures)
        return list(architectures)

    def compile(self, source: str, architecture: str, options: tuple[str, ...]) -> Compiled:
        program = ctypes.c_void_p()
        self._call("nvrtcCreateProgram", ctypes.byref(program), source.encode(), b"source.cu", 0, None, None)
        try:
            arguments = [f"--gpu-architecture={architecture}".encode(), *(option.encode() for option in options)]
            array = (ctypes.c_char_p * len(arguments))(*arguments)
            status = self._library.nvrtcCompileProgram(program, len(arguments), array)
            log = self._fetch(program, "ProgramLog").rstrip(b"\0").decode()
            if status:
                raise CompileError(f"for {architecture}: {log}")
            image = self._fetch(program, "PTX" if architecture.startswith("compute_") else "CUBIN")
            return Compiled(image, _OLD_TARGET.sub("", log).strip())
        finally:
            self._call("nvrtcDestroyProgram", ctypes.byref(program))

    def _fetch(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        content = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{what}", program, content)
        return content.raw

    def _call(self, function: str, *arguments: object) -> None:
        status = getattr(self._library, function)(*arguments)
        if status:
            raise RuntimeError(f"{function}: {self._library.nvrtcGetErrorString(status).decode()}")
