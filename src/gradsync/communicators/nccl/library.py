"""All that is asked of NCCL and of the CUDA driver: by CuPy's binding, and by ctypes where CuPy has no function.

ncclCommInitRank, ncclCommDestroy and ncclCommAbort may block for ever if another rank has died. So each runs on a
daemon thread, and nobody waits for it without a deadline. CuPy's communicator calls ncclCommDestroy when Python
collects it, and could block the program anywhere, so Nccl keeps it alive until it has destroyed or aborted it.

Source: NCCL's API reference, `ncclDataType_t`, `ncclRedOp_t` and `ncclResult_t`.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from queue import SimpleQueue
from typing import Any

from gradsync.errors import (
    BackendUnavailable,
    CommunicatorClosed,
    NcclError,
    RendezvousTimeout,
    describe,
)
from gradsync.machine import run_with_timeout, start_thread
from gradsync.reduction import ReduceOp, dtype_name
from gradsync.rendezvous.client import RendezvousClient

#: NCCL's result codes: the name of each, and a hint for the user.
RESULTS = {
    1: (
        "ncclUnhandledCudaError",
        "a CUDA call failed: look for an earlier error in this rank's own kernels, or set NCCL_DEBUG=INFO",
    ),
    2: (
        "ncclSystemError",
        "a system call failed: is /dev/shm too small, or a network interface down? NCCL_DEBUG=INFO names the call",
    ),
    3: ("ncclInternalError", "this is a bug in NCCL, or memory was overwritten; NCCL_DEBUG=INFO shows where"),
    4: ("ncclInvalidArgument", "NCCL refused an argument; NCCL_DEBUG=WARN names the argument"),
    5: ("ncclInvalidUsage", "ranks share a GPU, or make different calls; NCCL_DEBUG=WARN shows the reason"),
    6: (
        "ncclRemoteError",
        "another rank, or the network to that rank, failed: the other rank's message shows the cause",
    ),
    7: ("ncclInProgress", "NCCL_COMM_BLOCKING=0 is set: CuPy cannot use communicators that do not block"),
    8: ("ncclTimeout", "NCCL waited too long for another rank"),
}

DESTROY_SECONDS = 10.0
_OLDEST_CUPY = 14
_OTHER_THREADS_CALL_SECONDS = 1.0  # how long abort waits for another thread's call before it interrupts it

_INSTALL = "pip install 'cupy-cuda12x[ctk]' nvidia-nccl-cu12 (cuda13x and cu13 where nvidia-smi shows CUDA 13)"

_log = logging.getLogger("gradsync")


def check_library() -> int:
    """Checks that this process can use CuPy and NCCL, and returns NCCL's version, such as 23203.

    Raises:
        BackendUnavailable: CuPy, NCCL or NVRTC cannot be loaded, CuPy is too old, or a variable is set with which
            gradsync cannot use them.
    """
    try:
        import cupy
        from cupy.cuda import nccl, nvrtc
    except ImportError as error:
        raise BackendUnavailable(f"CuPy cannot be imported ({error}): {_INSTALL}") from error
    if int(cupy.__version__.partition(".")[0]) < _OLDEST_CUPY:
        raise BackendUnavailable(
            f"CuPy {cupy.__version__} is too old, gradsync needs {_OLDEST_CUPY} or newer: "
            f"pip install --upgrade 'cupy-cuda12x[ctk]>={_OLDEST_CUPY}' (cuda13x where nvidia-smi shows CUDA 13)"
        )
    if not nccl.available:
        raise BackendUnavailable(
            "CuPy could not load libnccl.so.2: pip install nvidia-nccl-cu12, or nvidia-nccl-cu13 if "
            "your CuPy is cupy-cuda13x"
        )
    try:
        nvrtc.getVersion()
    except RuntimeError as error:
        raise BackendUnavailable(
            f"CuPy needs NVRTC to compile its kernels, and did not find it ({error}): {_INSTALL}"
        ) from error
    if os.environ.get("NCCL_COMM_BLOCKING") == "0":
        raise BackendUnavailable("NCCL_COMM_BLOCKING=0 is set, but CuPy cannot work with it: unset the variable")
    if os.environ.get("CUPY_ENABLE_UMP", "0") != "0":  # then cupy.asarray does not copy
        raise BackendUnavailable(
            "CUPY_ENABLE_UMP is set, so CuPy's arrays may be in host memory, which gradsync does not support: "
            "unset the variable"
        )
    return int(nccl.get_version())


class Nccl:
    """One NCCL communicator of a client's ranks, all of which must make it.

    If that fails, the caller must report it to the rendezvous server: the other ranks wait for this one.

    Args:
        client: this rank's connection to the rendezvous server.
        device_id: the CUDA number of this rank's device.
        group: the group's name, which no other has had since the last start of the ranks.
        deadline: for all steps, in time.monotonic() seconds.

    Attributes:
        device_id: see Args.
        has_ended: an event: NCCL has destroyed or aborted the communicator, or has failed to.

    Raises:
        NcclError: NCCL failed.
        RendezvousTimeout: a rank did not make its communicator in time.
        RendezvousError: the connection to the rendezvous server was lost.
        RankFailed: a rank died.
    """

    def __init__(self, client: RendezvousClient, device_id: int, group: str, deadline: float) -> None:
        import cupy
        from cupy.cuda import nccl

        self.device_id = device_id
        self._cupy: Any = cupy
        self._binding: Any = nccl
        # CuPy's NcclError does not know results 7 and 8.
        self._raised = (nccl.NcclError, KeyError, cupy.cuda.runtime.CUDARuntimeError)
        self._label = client.label
        self._datatypes = _datatypes(nccl)
        self._ops = {
            ReduceOp.SUM: nccl.NCCL_SUM,
            ReduceOp.MEAN: nccl.NCCL_AVG,
            ReduceOp.PROD: nccl.NCCL_PROD,
            ReduceOp.MIN: nccl.NCCL_MIN,
            ReduceOp.MAX: nccl.NCCL_MAX,
        }
        self._calling = threading.RLock()  # held during a call of NCCL, or all calls of a group
        self._ending = threading.Lock()  # protects _how
        self._how: str | None = None
        # How to end it ("abort" or "destroy"), and a function to call before. Only the first counts.
        self._ends: SimpleQueue[tuple[str, Callable[[], None] | None]] = SimpleQueue()
        self.has_ended = threading.Event()
        key = f"nccl/{group}/id"
        if client.rank == 0:
            with self._errors("ncclGetUniqueId"):
                # Any process with the id can join, so no error or log may have it.
                client.set(key, bytes(nccl.get_unique_id()))
        unique_id = client.get(key, from_rank=0, timeout_seconds=_left(deadline))
        # ncclCommInitRank waits for all ranks, and nothing can interrupt it. So they first meet at the server, with a
        # timeout.
        client.barrier(f"nccl/{group}/ready", timeout_seconds=_left(deadline))
        self._raw: Any = None  # CuPy's communicator
        try:
            self._init_rank(client, unique_id, _left(deadline))
        except BaseException:
            self._ends.put(("abort", None))  # ncclCommInitRank may still return
            raise

    def _init_rank(self, client: RendezvousClient, unique_id: bytes, seconds: float) -> None:
        """Calls ncclCommInitRank, with a time limit, and starts the thread that will end the communicator."""

        def init() -> None:
            with self._errors("ncclCommInitRank"):
                self._cupy.cuda.Device(self.device_id).use()  # for good: going back would make a context on GPU 0
                self._raw = self._binding.NcclCommunicator(client.world_size, unique_id, client.rank)
                # _await_end releases this reference; see the top of this file.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._raw))
                try:
                    # Now, as no thread can be started at interpreter exit.
                    start_thread(threading.Thread(target=self._await_end, name="gradsync-nccl-end", daemon=True))
                except BackendUnavailable:  # the system can start no thread
                    self._raw.abort()
                    raise

        try:
            run_with_timeout(init, "gradsync-nccl-init", seconds, client.check)
        except TimeoutError as error:
            raise RendezvousTimeout(
                f"{self._label}: ncclCommInitRank on cuda:{self.device_id} did not return within {seconds:.3g} s, "
                "although all ranks had called it: a network may drop NCCL's connections (NCCL_SOCKET_IFNAME chooses "
                "the interface), or a GPU may be stuck; NCCL_DEBUG=INFO shows more"
            ) from error

    # -- Collectives, on the current stream ------------------------------------------------------------------------
    # Arrays are contiguous and on the device. NCCL ignores a call without elements; empty messages are not sent.

    def all_reduce(self, source: Any, target: Any, op: ReduceOp) -> None:
        """Reduces the sources of all ranks into every rank's `target`, which may be its `source`."""
        datatype, per_element = self._datatypes[dtype_name(source.dtype)]
        self._call("allReduce", source.data.ptr, target.data.ptr, source.size * per_element, datatype, self._ops[op])

    def reduce(self, source: Any, target: Any | None, op: ReduceOp, root: int) -> None:
        """Reduces the sources of all ranks into the root's `target`, which may be its `source`; None elsewhere."""
        datatype, per_element = self._datatypes[dtype_name(source.dtype)]
        pointers = source.data.ptr, 0 if target is None else target.data.ptr
        self._call("reduce", *pointers, source.size * per_element, datatype, self._ops[op], root)

    def reduce_scatter(self, source: Any, target: Any, op: ReduceOp) -> None:
        """Reduces equal part i of all sources into the `target` of rank i, which may be that part of its `source`."""
        datatype, per_element = self._datatypes[dtype_name(source.dtype)]
        count = target.size * per_element
        self._call("reduceScatter", source.data.ptr, target.data.ptr, count, datatype, self._ops[op])

    def broadcast(self, flat: Any, root: int) -> None:
        """Copies the root's bytes to all ranks."""
        self._call("broadcast", flat.data.ptr, flat.data.ptr, flat.nbytes, self._binding.NCCL_UINT8, root)

    def all_gather(self, source: Any, target: Any) -> None:
        """Gathers parts of equal size from all ranks on every rank; `source` may be this rank's part of `target`."""
        self._call("allGather", source.data.ptr, target.data.ptr, source.nbytes, self._binding.NCCL_UINT8)

    def exchange(self, sends: Iterable[tuple[int, Any]], receives: Iterable[tuple[int, Any]]) -> None:
        """Sends and receives bytes, by peer, all at once. The peer receives, or sends, the same number of bytes."""
        with self.group():
            for name, messages in (("send", sends), ("recv", receives)):
                for peer, flat in messages:
                    if flat.size:
                        self._call(name, flat.data.ptr, flat.nbytes, self._binding.NCCL_UINT8, peer)

    @contextlib.contextmanager
    def group(self) -> Iterator[None]:
        """Launches the calls of the `with` block together at its end, so that they do not wait for each other.

        NCCL's group ends with the block even if that raises, as NCCL cannot withdraw calls. After an error the caller
        must abort the communicator.

        Raises:
            NcclError, CommunicatorClosed: as for the collectives.
        """
        with self._calling:
            self._refuse_ended("a group")
            try:
                with self._errors("ncclGroupStart"):
                    self._binding.groupStart()
                yield
                with self._errors("ncclGroupEnd"):
                    self._binding.groupEnd()
            except BaseException:
                # Does nothing if the group has ended or not begun. One that stays open would delay all later calls.
                with contextlib.suppress(self._binding.NcclError, KeyError):
                    self._binding.groupEnd()
                raise

    def _call(self, name: str, *arguments: Any) -> None:
        with self._calling:
            self._refuse_ended(name)
            try:
                getattr(self._raw, name)(*arguments, self._cupy.cuda.get_current_stream().ptr)
            except self._raised as error:
                raise self._converted(f"nccl{name[0].upper()}{name[1:]}", error) from error

    def _refuse_ended(self, what: str) -> None:
        if self._how is not None:  # CuPy would pass a null pointer to NCCL
            raise CommunicatorClosed(f"{self._label}: {what} needs an NCCL communicator that has not been ended")

    # -- Failures --------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises NcclError if a collective has failed after its launch (ncclCommGetAsyncError)."""
        with self._ending:
            if self._how is None:
                try:
                    self._raw.check_async_error()
                except self._raised as error:
                    raise self._converted("a collective", error) from error

    @contextlib.contextmanager
    def _errors(self, call: str) -> Iterator[None]:
        """Converts errors of NCCL and CUDA in the `with` block to NcclError."""
        try:
            yield
        except self._raised as error:
            raise self._converted(call, error) from error

    def _converted(self, call: str, error: Exception) -> NcclError:
        if isinstance(error, self._cupy.cuda.runtime.CUDARuntimeError):
            return NcclError(f"{self._label}: {call}: {error}", code=1, name=RESULTS[1][0])
        known = error.args[0] if isinstance(error, KeyError) else error.status  # type: ignore[attr-defined]
        code = known if isinstance(known, int) else 0
        name, hint = RESULTS.get(code, (f"ncclResult {code}", "NCCL_DEBUG=INFO shows more"))
        last = last_error()
        return NcclError(
            f"{self._label}: {call} failed with {name} ({code}){last and f': {last}'}; {hint}. NCCL "
            f"{version_text(self._binding.get_version())} from {library_path()}, CuPy {self._cupy.__version__}",
            code=code,
            name=name,
        )

    # -- The end ---------------------------------------------------------------------------------------------------

    def abort(self, before: Callable[[], None] | None = None) -> None:
        """Ends the communicator now, on a thread, and returns. Results of running collectives are undefined.

        Args:
            before: what the thread calls first; it may block.
        """
        self._begin_end("abort", before)

    def destroy(self) -> None:
        """Ends the communicator after its collectives have ended. Returns after DESTROY_SECONDS at the latest."""
        self._begin_end("destroy", None)
        if not self.has_ended.wait(DESTROY_SECONDS):
            _log.warning(
                "%s: ncclComm%s did not return within %g s; gradsync no longer waits for it",
                self._label,
                str(self._how).title(),
                DESTROY_SECONDS,
            )

    def leave(self, before: Callable[[], None]) -> None:
        """Destroys the communicator, unless it has ended, and does not wait. Nobody may use it any more.

        It takes no lock: Python may collect a communicator in a thread that holds it.

        Args:
            before: what a thread calls first; it may block.
        """
        self._ends.put(("destroy", before))

    def _begin_end(self, how: str, before: Callable[[], None] | None) -> None:
        with self._ending:
            if self._how is not None:
                return
            self._how = how
        self._ends.put((how, before))

    def _await_end(self) -> None:
        """Waits until the communicator is to end, and ends it; on a thread of its own."""
        # The device first: later another thread may hold the driver's lock, e.g. if cudaFree waits for a hung kernel.
        self._cupy.cuda.Device(self.device_id).use()
        how, before = self._ends.get()
        try:
            if before is not None:
                before()
            with self._ending:
                self._how = how
            if how == "abort":
                self._revoke()
            # A thread that is blocked in a call holds this lock. NCCL calls an abort safe only if no thread is in a
            # call; but without ncclCommRevoke nothing else ends a blocked one.
            idle = self._calling.acquire(timeout=_OTHER_THREADS_CALL_SECONDS)
            try:
                with self._errors(f"ncclComm{how.title()}"):
                    getattr(self._raw, how)()
            finally:
                if idle:
                    self._calling.release()
        except Exception as error:  # usually an error of NCCL or CUDA; this thread has no caller that could handle it
            _log.warning("%s", describe(error))
        finally:
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(self._raw))
            self.has_ended.set()

    def _revoke(self) -> None:
        """Ends the calls in which other threads are blocked, where NCCL has ncclCommRevoke (2.29)."""
        function = _nccl_function("ncclCommRevoke")
        if function is not None:
            function.argtypes = [ctypes.c_void_p, ctypes.c_int]
            function(self._raw.comm, 0)


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


def version_text(version: int) -> str:
    """Returns NCCL's version as text, such as "2.32.3" for 23203."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def last_error() -> str:
    """Returns the text of ncclGetLastError, or "".

    NCCL keeps one for the process, and ignores the communicator that is its argument; so there is one even if
    ncclCommInitRank has failed. Source: NCCL, src/init.cc and src/debug.cc (ncclLastError).
    """
    function = _nccl_function("ncclGetLastError")
    if function is None:
        return ""
    function.restype, function.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
    text = function(None)
    return text.decode(errors="replace").strip() if text else ""


def library_path() -> str:
    """Returns the path of the NCCL library that this process has loaded, from /proc/self/maps."""
    with contextlib.suppress(OSError), open("/proc/self/maps") as maps:
        for line in maps:
            path = line.split(maxsplit=5)[-1].strip()
            if os.path.basename(path).startswith("libnccl.so"):  # and not a plugin's, such as libnccl-net.so
                return path
    return "an unknown place"


def _nccl_function(name: str) -> Any:
    """Returns a function of NCCL that CuPy does not expose; None if this NCCL has none of that name."""
    path = library_path()
    try:
        return getattr(ctypes.CDLL(path), name) if os.path.exists(path) else None
    except (OSError, AttributeError):
        return None


# -- The CUDA driver, by ctypes: CuPy's own functions for these hold the GIL while another thread has the driver's lock


def event_status(event: Any) -> int:
    """Returns CUDA's code for a CuPy event: 0 if the GPU has reached it, 600 if not; else the error of the GPU."""
    return int(driver().cuEventQuery(ctypes.c_void_p(event.ptr)))


@functools.cache
def driver() -> Any:
    """Returns the library of the CUDA driver."""
    return ctypes.CDLL("libcuda.so.1")


def _datatypes(nccl: Any) -> dict[str, tuple[int, int]]:
    """Returns for each dtype that NCCL reduces its code for the values, and how many of them an element has."""
    names = "float16", "bfloat16", "float32", "float64", "int8", "int32", "int64", "uint8", "uint32", "uint64"
    return {name: (getattr(nccl, f"NCCL_{name.upper()}"), 1) for name in names} | {
        "complex64": (nccl.NCCL_FLOAT32, 2),
        "complex128": (nccl.NCCL_FLOAT64, 2),
        "bool": (nccl.NCCL_UINT8, 1),
    }
