"""The errors of CUDA and of NCCL, with the texts that CuPy gives."""

from __future__ import annotations

INVALID_VALUE, INITIALIZATION_ERROR, INVALID_CONFIGURATION, NO_DEVICE, INVALID_DEVICE = 1, 3, 9, 100, 101
INVALID_RESOURCE_HANDLE, SYMBOL_NOT_FOUND, NOT_READY, ILLEGAL_ADDRESS, LAUNCH_FAILURE = 400, 500, 600, 700, 719
CAPTURE_UNSUPPORTED, CAPTURE_INVALIDATED, CAPTURE_ISOLATION, CAPTURE_IMPLICIT, CAPTURED_EVENT = 900, 901, 905, 906, 907

_CUDA_TEXTS = {
    INVALID_VALUE: "cudaErrorInvalidValue: invalid argument",
    INITIALIZATION_ERROR: "cudaErrorInitializationError: initialization error",
    INVALID_CONFIGURATION: "cudaErrorInvalidConfiguration: invalid configuration argument",
    NO_DEVICE: "cudaErrorNoDevice: no CUDA-capable device is detected",
    INVALID_DEVICE: "cudaErrorInvalidDevice: invalid device ordinal",
    INVALID_RESOURCE_HANDLE: "cudaErrorInvalidResourceHandle: invalid resource handle",
    SYMBOL_NOT_FOUND: "cudaErrorSymbolNotFound: named symbol not found",
    NOT_READY: "cudaErrorNotReady: device not ready",
    ILLEGAL_ADDRESS: "cudaErrorIllegalAddress: an illegal memory access was encountered",
    LAUNCH_FAILURE: "cudaErrorLaunchFailure: unspecified launch failure",
    CAPTURE_UNSUPPORTED: "cudaErrorStreamCaptureUnsupported: operation not permitted when stream is capturing",
    CAPTURE_INVALIDATED: "cudaErrorStreamCaptureInvalidated: operation failed due to a previous error during capture",
    CAPTURE_ISOLATION: "cudaErrorStreamCaptureIsolation: dependency created on uncaptured work in another stream",
    CAPTURE_IMPLICIT: "cudaErrorStreamCaptureImplicit: operation would make the legacy stream depend on a capturing "
    "blocking stream",
    CAPTURED_EVENT: "cudaErrorCapturedEvent: operation not permitted on an event last recorded in a capturing stream",
}


class CUDARuntimeError(RuntimeError):
    """A call to CUDA failed.

    Args:
        status: the code of cudaError_t.
    """

    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(_CUDA_TEXTS[status])


UNHANDLED_CUDA_ERROR, SYSTEM_ERROR, INTERNAL_ERROR, INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR = range(1, 7)

_NCCL_TEXTS = {
    UNHANDLED_CUDA_ERROR: "NCCL_ERROR_UNHANDLED_CUDA_ERROR: unhandled cuda error",
    SYSTEM_ERROR: "NCCL_ERROR_SYSTEM_ERROR: unhandled system error (run with NCCL_DEBUG=INFO for details)",
    INTERNAL_ERROR: "NCCL_ERROR_INTERNAL_ERROR: internal error - please report this issue to the NCCL developers",
    INVALID_ARGUMENT: "NCCL_ERROR_INVALID_ARGUMENT: invalid argument (run with NCCL_DEBUG=WARN for details)",
    INVALID_USAGE: "NCCL_ERROR_INVALID_USAGE: invalid usage (run with NCCL_DEBUG=WARN for details)",
    REMOTE_ERROR: "NCCL_ERROR_REMOTE_ERROR: remote process exited or there was a network error",
}


class NcclError(RuntimeError):
    """A call to NCCL failed.

    Args:
        status: the code of ncclResult_t; CuPy's own raises a KeyError for 7 and 8, too.
        detail: what the fake adds to NCCL's text.
    """

    def __init__(self, status: int, detail: str = "") -> None:
        self.status, self.detail = status, detail
        super().__init__(_NCCL_TEXTS[status] + (f" [fake: {detail}]" if detail else ""))
