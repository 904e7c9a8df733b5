"""The error of the CUDA runtime, with the texts that CuPy gives."""

from __future__ import annotations

INVALID_VALUE = 1
INITIALIZATION_ERROR = 3
INVALID_CONFIGURATION = 9
NO_DEVICE = 100
INVALID_DEVICE = 101
INVALID_RESOURCE_HANDLE = 400
SYMBOL_NOT_FOUND = 500
NOT_READY = 600
ILLEGAL_ADDRESS = 700
LAUNCH_FAILURE = 719
CAPTURE_UNSUPPORTED = 900
CAPTURE_INVALIDATED = 901
CAPTURE_ISOLATION = 905
CAPTURE_IMPLICIT = 906
CAPTURED_EVENT = 907

_TEXTS = {
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
        super().__init__(_TEXTS[status])

    def __reduce__(self):
        return type(self), (self.status,)
