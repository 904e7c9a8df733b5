"""The raw communicator of NCCL: calls with our errors, and an end that never hangs.

ncclCommInitRank, ncclCommDestroy and ncclCommAbort may block for ever when another rank is gone; each runs on a daemon
thread, waited for until a deadline. CuPy destroys a communicator when its object is collected, which could block
anywhere; so the object is kept alive until it has been ended here.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import cupy

from gradsync.communicators.nccl.library import NcclLibrary
from gradsync.errors import CommunicatorClosed, NcclError, describe

DESTROY_SECONDS = 10.0
_OTHER_THREADS_CALL_SECONDS = 1.0  # how long abort waits for a call to come back before it interrupts it
_CUDA_SUCCESS = 0
_LOOK_SECONDS = 0.05  # after an abort, while the GPU still has work of ours

_log = logging.getLogger("gradsync")


class NcclHandle:
    """One communicator of NCCL on one device.

    Args:
        library: NCCL.
        raw: CuPy's NcclCommunicator.
        device_id: its device.
        label: this rank in messages.

    Attributes:
        library, device_id: see above.
    """

    def __init__(self, library: NcclLibrary, raw: Any, device_id: int, label: str) -> None:
        self.library = library
        self._raw = raw
        self.device_id = device_id
        self._label = label
        self._pid = os.getpid()
        self._calling = threading.RLock()  # a group holds it for the calls within
        self._ending = threading.Lock()  # held for looking at and setting what follows
        self._how: str | None = None
        self._kept: list[tuple[Any, Sequence[object]]] = []  # what keep_until_end has been given
        self._orders: SimpleQueue[Callable[[], None] | None] = SimpleQueue()  # the last one is None
        self._has_ended = threading.Event()
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(raw))  # until the end: see the module's text
        # Started now: at interpreter exit no thread can be started any more.
        threading.Thread(target=self._obey, name="gradsync-nccl-end", daemon=True).start()

    def call(self, name: str, *arguments: Any) -> Any:
        """Calls a method of CuPy's communicator, and returns its result.

        Raises:
            NcclError: NCCL refused or failed.
            CommunicatorClosed: another thread has ended it.
        """
        with self._calling:
            self._check_not_ended(name)
            with self.library.errors(f"nccl{name[0].upper()}{name[1:]}", self._label, self._raw):
                return getattr(self._raw, name)(*arguments)

    @contextmanager
    def group(self) -> Iterator[None]:
        """What is called within is launched at its end, together: messages that would wait for each other need that.

        However the block ends, NCCL's group ends with it. Where that is by an error of Python, what was called before
        is launched all the same, because NCCL cannot take it back: such an error ends the communicator.

        Raises:
            NcclError, CommunicatorClosed: as for `call`.
        """
        nccl = self.library.binding
        with self._calling:
            self._check_not_ended("a group")
            try:
                with self.library.errors("ncclGroupStart", self._label, self._raw):
                    nccl.groupStart()
                yield
                with self.library.errors("ncclGroupEnd", self._label, self._raw):
                    nccl.groupEnd()
            except BaseException:
                # A group that had ended, or not begun, is refused here; one left open would swallow all calls to come.
                with suppress(nccl.NcclError, KeyError):
                    nccl.groupEnd()
                raise

    def check(self) -> None:
        """Raises NcclError when a collective has failed since it was launched."""
        with self._ending:
            if self._how is None:
                with self.library.errors("a collective", self._label, self._raw):
                    self._raw.check_async_error()

    def has_failed(self) -> bool:
        """Whether check() would raise."""
        try:
            self.check()
        except NcclError:
            return True
        return False

    def begin_abort(self, before: Callable[[], None] | None = None) -> None:
        """Ends it now, on another thread: what is queued ends with undefined data. Returns at once.

        Args:
            before: called on that thread first; may block.
        """
        self._begin("abort", before)

    def destroy(self) -> None:
        """Ends it in order, after what is queued. Returns at the deadline at the latest."""
        self._begin("destroy", None)
        self.await_end(DESTROY_SECONDS)

    def leave(self, before: Callable[[], None] | None = None) -> None:
        """Ends it as begin_abort() does, unless it has ended; nobody will use it any more.

        For the garbage collector, which may strike while its thread holds any lock: this takes none.

        Args:
            before: called on another thread first, in any case.
        """
        self._orders.put(partial(self._leave, before))

    def keep_until_end(self, objects: Sequence[object], ended: Any) -> None:
        """Keeps objects, and with them GPU memory, until the GPU cannot use it any more.

        ncclCommAbort waits for NCCL's own work, and not for ours that is queued behind it: copies and kernels.

        Args:
            objects: what a launch uses that has failed.
            ended: the event after all of that launch's work. What it never reaches is kept for ever.
        """
        with self._ending:
            self._kept.append((ended, objects))
        self._orders.put(self._let_go)

    def await_end(self, seconds: float) -> None:
        """Waits until it has ended, or the deadline comes."""
        if os.getpid() == self._pid and not self._has_ended.wait(seconds):
            _log.warning(
                "%s: ncclComm%s did not return within %g s; left behind", self._label, str(self._how).title(), seconds
            )

    def _check_not_ended(self, what: str) -> None:
        if self._how is not None:  # what CuPy would pass on then is a null pointer
            raise CommunicatorClosed(f"{self._label}: {what} on a communicator of NCCL that has been ended")

    def _begin(self, how: str, before: Callable[[], None] | None) -> None:
        with self._ending:
            if self._how is not None or os.getpid() != self._pid:
                return
            self._how = how
        self._orders.put(partial(self._end, before))

    def _obey(self) -> None:
        """The thread: does what may block, until nobody uses the communicator."""
        is_used = True
        while is_used or self._kept:
            try:
                order = self._orders.get(timeout=_LOOK_SECONDS if self._kept else None)
            except Empty:
                order = self._let_go
            if order is None:
                is_used = False
            else:
                order()

    def _let_go(self) -> None:
        """Gives kept memory back, when NCCL has ended and the GPU has come to the end of the launch."""
        if not self._has_ended.is_set():
            return
        with self._ending:
            before = self._kept  # until this returns: what frees memory may do so without the lock
            self._kept = [entry for entry in before if cupy.cuda.runtime.eventQuery(entry[0].ptr) != _CUDA_SUCCESS]

    def _leave(self, before: Callable[[], None] | None) -> None:
        try:
            if before is not None:
                before()
        finally:
            self.begin_abort()
            self._orders.put(None)

    def _end(self, before: Callable[[], None] | None) -> None:
        try:
            if before is not None:
                before()
            self._call_end()
        except Exception as error:  # NCCL's and CUDA's above all: there is nobody to raise to
            _log.warning("%s", describe(error))
        finally:
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(self._raw))
            self._has_ended.set()
            self._let_go()

    def _call_end(self) -> None:
        # A thread that is stuck inside a call holds this. Abort is documented as safe only without, but it is also
        # the only way to free that thread.
        idle = self._calling.acquire(timeout=_OTHER_THREADS_CALL_SECONDS)
        try:
            with (
                cupy.cuda.Device(self.device_id),
                self.library.errors(f"ncclComm{str(self._how).title()}", self._label),
            ):
                getattr(self._raw, str(self._how))()
        finally:
            if idle:
                self._calling.release()
