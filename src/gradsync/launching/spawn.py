"""`gs.spawn`: calls a function in several rank processes on this machine; the caller waits for them, or continues."""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import signal
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gradsync.arguments import check_integer, check_port, did_you_mean, integer_of
from gradsync.backends import BACKENDS
from gradsync.errors import InvalidArgument
from gradsync.launching.in_rank.result import ReturnValue
from gradsync.launching.job import Job, choose_gpus, parse_gpus
from gradsync.launching.launch import (
    check_start_method,
    failure,
    function_target,
    load_result,
    own_backend,
    raise_for_signal,
    warn_of_start_method,
)
from gradsync.launching.outcome import Outcome, RankOutcome, failure_text, signal_name
from gradsync.launching.rank_process import RankProcess
from gradsync.launching.signals import SignalInbox
from gradsync.launching.supervisor import Supervisor
from gradsync.machine import Latch, default_process_count, interface_of
from gradsync.rendezvous.sockets import look_up

_PROXIES = ("http_proxy", "https_proxy")

_KNOWN = ("start_method", "gpus", "ips", "backend", "print_config")
# For each deprecated option: the option that gets its value, and the end of the warning.
_DEPRECATED = {
    "selected_devices": ("gpus", "; use gpus"),
    "cluster_node_ips": ("ips", "; use ips"),
    "node_ip": ("ips", "; use ips"),
    "started_port": ("started_port", "; without it the rendezvous server takes a free port"),
    "use_paddlecloud": ("use_paddlecloud", " and does nothing: PaddleCloud is out of scope"),
}


def spawn(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    nprocs: int = -1,
    join: bool = True,
    daemon: bool = False,
    **options: Any,
) -> MultiprocessContext:
    """Calls `func(*args)` in `nprocs` processes on this machine.

    Each process gets RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its environment,
    and the variables that `init_process_group()` needs, but not http_proxy and https_proxy. The function must call
    `init_process_group()` itself. When a process fails, gradsync ends the other processes, unless only the return value
    could not be sent. Each process is a fresh interpreter, so a script that calls `spawn` needs the `if __name__ ==
    "__main__":` guard.

    Args:
        func: a function of any kind, also a lambda, a closure or a function of a notebook.
        args: the function's positional arguments, of types that pickle or cloudpickle can pickle.
        nprocs: the number of processes; -1 means one per entry of `gpus`; without `gpus`, one per visible GPU; without
            a GPU, or with the backend "shm", one per usable core.
        join: whether to wait for all processes. If False, a thread watches the processes while the caller continues.
        daemon: whether this program, at its end, ends the processes instead of waiting for them (only with
            `join=False`).
        **options: start_method: "spawn", "fork" or "forkserver", which all do the same; see `gs.set_start_method`.
            gpus: the GPUs of the processes, one for each, such as "4,5"; if CUDA_VISIBLE_DEVICES is set, it must
            contain these GPUs. ips: addresses of this machine. backend: the backend that `init_process_group("auto")`
            uses; "auto" chooses the backend by the devices, and "gloo" means "shm". print_config: whether to print the
            settings. These options are deprecated, and give a DeprecationWarning: selected_devices (use gpus),
            cluster_node_ips and node_ip (use ips), started_port (the port of the rendezvous server), use_paddlecloud.

    Returns:
        A context with the processes, their results and errors, and the method `join(timeout)`.

    Raises:
        InvalidArgument: an option is unknown or has a wrong value; the function or an argument cannot be pickled; an
            environment variable of gradsync is invalid; or this process is a rank.
        BackendUnavailable: the system is not Linux, or allows no more processes or open files.
        RankFailed: a process failed, for example because the `__main__` guard is missing, or its return value cannot be
            pickled (only with `join`). If an exception ended the process, the error's text is "Process 1 terminated
            with the following error:" and the traceback; otherwise the text names the signal or the exit code. A
            process that Ctrl-C has ended has no traceback.
        RendezvousError: started_port is taken.
        KeyboardInterrupt: after Ctrl-C, when all processes have ended (only with `join`).
        SystemExit: after SIGTERM or SIGHUP (only with `join`); the exit code is 128 + the signal's number.
    """
    given = _translate(options, stacklevel=2)
    _check_ips(given.get("ips"))
    backend = own_backend("spawn", given.get("backend", "auto"))
    if backend not in BACKENDS:
        raise InvalidArgument(f"spawn needs backend to be one of {', '.join(BACKENDS)}, got {backend!r}")
    gpus = given.get("gpus")
    count = _count_processes(nprocs, gpus, backend)
    method = given.get("start_method")
    if method is not None:
        check_start_method("spawn", method)
    devices = None if gpus is None else tuple(choose_gpus(gpus, count, os.environ))
    port = check_port("spawn", "started_port", given.get("started_port", 0))
    warn_of_start_method("spawn", method)
    target = function_target(func, args, {}, who="spawn")
    job = Job(
        target,
        count,
        backend=backend,
        rendezvous_port=port,
        gpus=devices,
        stdin_rank=0 if join else None,  # a caller that continues may read standard input itself
        removed_variables=frozenset(name for name in os.environ if name.lower() in _PROXIES),
    )
    if given.get("print_config"):
        gpus_text = "as this process" if devices is None else ",".join(devices)
        print(
            f"gradsync.spawn: nprocs {count}, start_method spawn, backend {backend}, gpus {gpus_text}, "
            f"port {port or 'a free one'}",
            flush=True,
        )
    context = MultiprocessContext(job, joins=join, daemon=daemon)
    if join:
        context.run()
    return context


def _translate(options: Mapping[str, Any], stacklevel: int) -> dict[str, Any]:
    """Returns the options under their current names; leaves out options with the value None."""
    given = {name: value for name, value in options.items() if name in _KNOWN and value is not None}
    for name, value in options.items():
        if name in _DEPRECATED:
            new_name, advice = _DEPRECATED[name]
            text = f"spawn: the option {name} is deprecated{advice}"
            warnings.warn(text, DeprecationWarning, stacklevel=stacklevel + 1)
            if value is not None:
                given.setdefault(new_name, value)
        elif name not in _KNOWN:
            known = f"(it has {', '.join(_KNOWN)})"
            raise InvalidArgument(f"spawn has no option {name!r}{did_you_mean(name, (*_KNOWN, *_DEPRECATED))} {known}")
    return given


def _count_processes(nprocs: int, gpus: str | Sequence[int | str] | None, backend: str) -> int:
    if integer_of(nprocs) != -1:
        return check_integer("spawn", "nprocs", nprocs, 1)
    if gpus is not None:
        return len(parse_gpus(gpus))
    return default_process_count("cpu" if backend == "shm" else "auto")


def _check_ips(ips: str | Sequence[str] | None) -> None:
    """Raises InvalidArgument if an address does not belong to this machine."""
    if ips is None:
        return
    for ip in ips.split(",") if isinstance(ips, str) else ips:
        if not isinstance(ip, str) or not _is_own(ip.strip()):
            raise InvalidArgument(
                f"spawn starts processes on this machine only, and {ip!r} in ips {ips!r} does not belong to it; for "
                "several machines decorate the function with gs.launcher(rank_start=...), and call it on each machine"
            )


def _is_own(host: str) -> bool:
    """Returns whether a host name or address belongs to this machine."""
    try:
        return host != "" and interface_of(look_up(host, 0)[0][4][0]) is not None
    except (OSError, ValueError):  # not a host name or address
        return False


class MultiprocessContext:
    """The ranks that `gs.spawn` has started.

    Args:
        job: the job to run.
        joins: whether the caller watches the ranks by a call of `run`; if not, a thread watches them.
        daemon: whether this program, at its end, ends the ranks instead of waiting for them.

    Attributes:
        processes: a `SpawnedProcess` for each rank.
    """

    def __init__(self, job: Job, *, joins: bool, daemon: bool) -> None:
        self._end = Latch()
        self._outcome: Outcome | None = None
        self._error: BaseException | None = None
        self.processes: list[SpawnedProcess] = []
        try:
            # The inbox delays a Ctrl-C, which could otherwise leave started ranks that no thread watches.
            with contextlib.nullcontext() if joins else SignalInbox():
                try:
                    self._start(job, joins=joins, daemon=daemon)
                except BaseException:
                    self._end.set()  # because no thread will watch the ranks
                    raise
        except KeyboardInterrupt:
            self._interrupt()
            raise

    def _start(self, job: Job, *, joins: bool, daemon: bool) -> None:
        with contextlib.ExitStack() as stack:
            self._signals = stack.enter_context(SignalInbox(installs_handlers=joins))
            self._supervisor = stack.enter_context(Supervisor(job, self._signals, on_change=self._update_process))
            self._supervisor.start()
            self.processes = [SpawnedProcess(rank, daemon=daemon) for rank in self._supervisor.ranks]
            self._resources = stack.pop_all()
        if not joins:
            # Not a daemon by default: as with multiprocessing, a program waits for its processes at its end.
            thread = threading.Thread(target=self._watch, name="gradsync-supervisor", daemon=daemon)
            thread.start()
            # The terminal does not send Ctrl-C to the ranks.
            threading._register_atexit(_end_if_interrupted, weakref.ref(self), os.getpid())  # type: ignore[attr-defined]

    @property
    def return_queues(self) -> list[RankQueue]:
        """For each rank, a queue that gets the return value of the rank's function."""
        return [process.return_queue for process in self.processes]

    @property
    def error_queues(self) -> list[RankQueue]:
        """For each rank, a queue that gets the traceback of the exception that ended the rank."""
        return [process.error_queue for process in self.processes]

    @property
    def sentinels(self) -> list[int]:
        """For each rank, a descriptor for `multiprocessing.connection.wait`; see `SpawnedProcess.sentinel`."""
        return [process.sentinel for process in self.processes]

    def pids(self) -> list[int | None]:
        """Returns each rank's process id; None if the rank never began. Waits until all ranks have begun or ended."""
        return [process.pid for process in self.processes]

    def join(self, timeout: float | None = None) -> bool:
        """Waits until all ranks have ended. During the wait, Ctrl-C asks the ranks to end; a second Ctrl-C kills them.

        Args:
            timeout: how many seconds to wait at most.

        Returns:
            True if all ranks have ended, False at the timeout.

        Raises:
            RankFailed: a rank failed; all ranks have ended.
            KeyboardInterrupt: Ctrl-C came; all ranks have ended.
        """
        try:
            if not self._end.wait(timeout):
                return False
        except KeyboardInterrupt:
            self._interrupt()
            raise
        self._raise_failure()
        return True

    def run(self) -> None:
        """Watches the ranks, in the calling thread, until they have ended.

        Raises:
            RankFailed, KeyboardInterrupt: under the same conditions as in `join`.
            SystemExit: SIGTERM or SIGHUP came.
        """
        self._watch()
        if self._outcome is not None:
            raise_for_signal(self._outcome)
        self._raise_failure()

    def _watch(self) -> None:
        try:
            with self._resources:
                self._outcome = self._supervisor.finish()
            if self._outcome.signal_number is None and self._outcome.root_cause is not None:
                atexit.register(self._print_failure)
        except BaseException as error:
            self._error = error
        finally:
            for process in self.processes:
                process.update(has_ended=True)  # also a process that cannot be killed
            del self._supervisor  # a reference cycle would keep the sentinels open
            self._end.set()

    def _update_process(self, rank: RankProcess) -> None:
        if self.processes:  # the list is empty if a start failed
            self.processes[rank.rank].update()

    def _interrupt(self) -> None:
        """Ends the ranks like a Ctrl-C, and waits for their end."""
        while not self._end.is_set:
            self._signals.put(signal.SIGINT)
            with contextlib.suppress(KeyboardInterrupt):  # the loop forwards this second Ctrl-C too
                self._end.wait()

    def _raise_failure(self) -> None:
        atexit.unregister(self._print_failure)
        if self._error is not None:
            raise self._error
        outcome = self._outcome
        if outcome is not None and outcome.signal_number is None and (root := outcome.root_cause) is not None:
            raise failure(outcome, root, _headline(root))

    def _print_failure(self) -> None:
        """Prints a failure at the end of the program, unless `join` has raised it."""
        if self._outcome is not None:
            sys.stderr.write(failure_text(self._outcome))


def _end_if_interrupted(reference: weakref.ref[MultiprocessContext], pid: int) -> None:
    """Ends the ranks if Ctrl-C ends the program. The interpreter calls this function before it waits for threads."""
    context = reference()
    # A forked copy of the program leaves the ranks alone.
    if context is not None and pid == os.getpid() and getattr(sys, "last_type", None) is KeyboardInterrupt:
        context._signals.put(signal.SIGINT)


def _headline(root: RankOutcome) -> str:
    if root.error is not None:
        return f"Process {root.rank} terminated with the following error:"
    if root.exit_code is None:
        return f"Process {root.rank} could not be killed; it may hang in the kernel (pid {root.pid})"
    if root.exit_code >= 0:
        return f"Process {root.rank} terminated with exit code {root.exit_code}"
    return f"Process {root.rank} terminated with signal {signal_name(-root.exit_code)}{root.out_of_memory}"


class RankQueue:
    """A queue for one object that a rank sends.

    `get` does not wait for an object that cannot arrive: it raises `queue.Empty` if the rank has ended without sending
    the object, or if an earlier call has returned the object.

    Args:
        objects: the list that gets the object when the object arrives.
        is_settled: a flag that is set when the object has arrived, or can no longer arrive.
        convert: a function that makes the result of `get` from the object.
    """

    def __init__(self, objects: list[Any], is_settled: Latch, convert: Callable[[Any], Any]) -> None:
        self._objects = objects
        self._is_settled = is_settled
        self._convert = convert

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Removes and returns the object that the rank has sent.

        Args:
            block: whether to wait for the object.
            timeout: how many seconds to wait at most.

        Raises:
            queue.Empty: nothing arrived in time, or nothing can arrive.
        """
        if block:
            self._is_settled.wait(timeout)
        try:
            thing = self._objects.pop()
        except IndexError:
            raise queue.Empty from None
        return self._convert(thing)

    def empty(self) -> bool:
        """Returns whether the queue is empty now."""
        return not self._objects


class SpawnedProcess:
    """One rank of `gs.spawn`, with methods like those of a started `multiprocessing.Process`.

    Attributes:
        rank: the number of the rank.
        name: the name of the process, such as "gradsync-rank-1" for rank 1.
        daemon: whether this program, at its end, ends the process instead of waiting for it.
        sentinel: a descriptor for `multiprocessing.connection.wait`. The descriptor becomes readable when the process
            and every process that it has started have ended.
        return_queue: a queue that gets the return value of the function.
        error_queue: a queue that gets the traceback, as text, of the exception that ended the process.
    """

    def __init__(self, rank: RankProcess, *, daemon: bool) -> None:
        self._rank = rank
        self.rank = rank.rank
        self.name = f"gradsync-rank-{rank.rank}"
        self.daemon = daemon
        # An eventfd stays readable for any number of readers, and a copy in a forked process does no harm.
        self.sentinel = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        weakref.finalize(self, os.close, self.sentinel).atexit = False
        self._results: list[ReturnValue] = []
        self._errors: list[str] = []
        self._has_reported = Latch()  # set when the rank has sent its result or error, or has ended
        self.return_queue = RankQueue(self._results, self._has_reported, lambda value: load_result(rank.rank, value))
        self.error_queue = RankQueue(self._errors, self._has_reported, str)
        self._begun = Latch()
        self._ended = Latch()

    def __repr__(self) -> str:
        state = f"stopped exitcode={self.exitcode}" if self._ended.is_set else "started"
        return f"<{type(self).__name__} name={self.name!r} {state}>"

    @property
    def pid(self) -> int | None:
        """The process id; None if the process never began. Reading this property waits for the process's start."""
        self._begun.wait()
        return self._rank.outcome.pid or None

    @property
    def exitcode(self) -> int | None:
        """The exit code; -n if signal n killed the process; None if the process still runs or cannot be killed."""
        if not self._ended.is_set:
            return None
        return self._rank.outcome.exit_code

    def is_alive(self) -> bool:
        """Returns whether the process, or a process that it has started, still runs."""
        return not self._ended.is_set

    def join(self, timeout: float | None = None) -> None:
        """Waits for the end of the process.

        Args:
            timeout: how many seconds to wait at most.
        """
        self._ended.wait(timeout)

    def terminate(self) -> None:
        """Sends SIGTERM to the process group of the rank: the process, and processes that it has started."""
        self._rank.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Sends SIGKILL to the process; the guard then kills all processes that this process has started."""
        self._rank.send_signal(signal.SIGKILL)

    def update(self, *, has_ended: bool = False) -> None:
        """Puts the rank's report into its queue. Only the thread that watches the rank calls this method.

        Args:
            has_ended: whether the caller knows that the rank has ended, or that gradsync cannot kill the rank.
        """
        outcome = self._rank.outcome
        has_ended = has_ended or self._rank.is_reaped
        if outcome.pid or has_ended:
            self._begun.set()
        if not self._has_reported.is_set and (has_ended or outcome.result is not None or outcome.error is not None):
            if outcome.result is not None:
                self._results.append(outcome.result)
            if outcome.error is not None:
                self._errors.append(outcome.error.text)
            self._has_reported.set()
        if has_ended and not self._ended.is_set:
            self._ended.set()
            os.eventfd_write(self.sentinel, 1)
