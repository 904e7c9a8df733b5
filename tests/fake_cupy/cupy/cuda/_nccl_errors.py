"""The error of NCCL, with the texts that CuPy gives."""

from __future__ import annotations

UNHANDLED_CUDA_ERROR, SYSTEM_ERROR, INTERNAL_ERROR, INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR = range(1, 7)

_INFO = "(run with NCCL_DEBUG=INFO for details)"
_WARN = "(run with NCCL_DEBUG=WARN for details)"
_TEXTS = {
    UNHANDLED_CUDA_ERROR: f"NCCL_ERROR_UNHANDLED_CUDA_ERROR: unhandled cuda error {_INFO}",
    SYSTEM_ERROR: f"NCCL_ERROR_SYSTEM_ERROR: unhandled system error {_INFO}",
    INTERNAL_ERROR: "NCCL_ERROR_INTERNAL_ERROR: internal error - please report this issue to the NCCL developers",
    INVALID_ARGUMENT: f"NCCL_ERROR_INVALID_ARGUMENT: invalid argument {_WARN}",
    INVALID_USAGE: f"NCCL_ERROR_INVALID_USAGE: invalid usage {_WARN}",
    REMOTE_ERROR: "NCCL_ERROR_REMOTE_ERROR: remote process exited or there was a network error",
}


class NcclError(RuntimeError):
    """A call of NCCL failed.

    Args:
        status: the code of ncclResult_t.
        detail: text of the stand-in, beside NCCL's own.
    """

    def __init__(self, status: int, detail: str = "") -> None:
        self.status = status
        self.detail = detail
        super().__init__(_TEXTS[status] + (f" [stand-in: {detail}]" if detail else ""))

    def __reduce__(self):
        return type(self), (self.status, self.detail)
