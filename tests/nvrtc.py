"""NVIDIA's run-time compiler by ctypes: CUDA source compiles without a GPU, by the nvidia-cuda-nvrtc-cu12 wheel."""

from __future__ import annotations

import ctypes
import importlib.metadata
import re
from pathlib import Path
from typing import NamedTuple

WHEEL = "nvidia-cuda-nvrtc-cu12"
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
    def __init__(self) -> None:
        path = find_library()
        try:
            self._library = ctypes.CDLL(str(path))
        except OSError as error:
            raise NvrtcMissing(f"{path} does not load: {error}") from error
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p

    def supported_architectures(self) -> list[int]:
        """Compute capabilities: 90 stands for 9.0."""
        count = ctypes.c_int()
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        architectures = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", architectures)
        return list(architectures)

    def compile(self, source: str, architecture: str, options: tuple[str, ...] = ()) -> Compiled:
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
