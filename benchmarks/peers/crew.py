"""The controller of the ranks of one system: starts them, sends all the same requests, ends them.

Ranks send pairs of a kind and a value: first (HELLO, {"rank": ..., "pid": ..., "versions": ...}), then an
(ANSWER, value) to each request, and at any time (FAILURE, traceback). `crew_member` is the other end.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

from gradsync.errors import GradsyncError

HELLO, ANSWER, FAILURE = "hello", "answer", "failure"

_START_SECONDS = 120.0  # for all ranks to have met
_ANSWER_SECONDS = 600.0  # for all answers to a request
_END_SECONDS = 20.0  # for ranks to end by themselves; then they are killed
# How long after the first sign of a failure its cause may arrive.
_LAST_WORDS_SECONDS = 2.0
_LAST_LINES = 20


class CrewFailed(GradsyncError, RuntimeError):
    """The ranks of a system did not start, failed, or did not answer; they have been ended.

    Args:
        trouble: the failure, as the controller saw it.
        last_words: the ranks' last lines of output.
    """

    def __init__(self, trouble: str, last_words: Sequence[str]) -> None:
        super().__init__("\n".join([trouble, *last_words]))


class _Trouble(Exception):
    """A failure as the controller sees it; the ranks may know more."""


@dataclass(frozen=True)
class Start:
    """A process to start: a rank, or the launcher of all ranks.

    Attributes:
        command: word by word.
        variables: beside those of this process.
    """

    command: Sequence[str]
    variables: Mapping[str, str] = field(default_factory=dict)


class Crew:
    """The ranks of one system, which sleep between requests. A context: they end with it.

    Args:
        system: its name in messages.
        folder: private to this run, with a path short enough for a socket in it.
        starts: given the path of the controller's socket, returns the processes to start.
        ranks: how many come.
        working_folder: where the processes start; None is this process's.

    Raises:
        CrewFailed: they did not start.

    Attributes:
        system: as given.
        versions: of the ranks' software.
    """

    def __init__(
        self,
        system: str,
        folder: str,
        starts: Callable[[str], Sequence[Start]],
        ranks: int,
        working_folder: Path | None = None,
    ) -> None:
        self.system = system
        self._ranks = ranks
        self._working_folder = working_folder
        address = Path(folder) / system.replace("/", "-")
        self._log = address.with_suffix(".log")
        self._processes: list[subprocess.Popen[bytes]] = []
        self._rank_descriptors: list[int] = []
        self._connections: list[Connection] = []  # by rank
        self._last_words: list[str] = []
        try:
            hellos = self._meet(str(address), starts)
            self.versions: dict[str, str] = hellos[0]["versions"]
        except (_Trouble, OSError) as error:
            raise self._failure(f"did not start: {error}") from error
        except BaseException:
            self._end(0)
            raise

    def ask(self, method: str, *arguments: object) -> list[Any]:
        """Calls a method on all ranks at once.

        Returns:
            The answers by rank.

        Raises:
            CrewFailed: a rank failed, or did not answer in time.
        """
        try:
            for connection in self._connections:
                connection.send((method, *arguments))
            return self._receive(_ANSWER_SECONDS, ANSWER)
        except (_Trouble, OSError) as error:
            raise self._failure(f"asked for {method}: {error}") from error

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        exit_codes = self._end(_END_SECONDS)
        if error is None and any(exit_codes):
            raise self._failure(f"ended with exit codes {exit_codes}")

    # -- Start -------------------------------------------------------------------------------------------------

    def _meet(self, address: str, starts: Callable[[str], Sequence[Start]]) -> list[dict[str, Any]]:
        """Starts the ranks and waits until they have met one another; returns what they say, by rank."""
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen(self._ranks)
            for start in starts(address):
                self._start(start)
            deadline = time.monotonic() + _START_SECONDS
            while len(self._connections) < self._ranks:
                self._connections.append(self._accept(listener, deadline))
        hellos = self._receive(deadline - time.monotonic(), HELLO)
        self._rank_descriptors = [os.pidfd_open(hello["pid"]) for hello in hellos]
        order = sorted(range(self._ranks), key=lambda index: hellos[index]["rank"])
        self._connections = [self._connections[index] for index in order]
        return [hellos[index] for index in order]

    def _start(self, start: Start) -> None:
        with self._log.open("ab") as log:
            process = subprocess.Popen(
                start.command,
                cwd=self._working_folder,
                # Open MPI and PyTorch leave folders among the temporary files.
                env={**os.environ, "TMPDIR": str(self._log.parent), **start.variables},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the controller, which ends the ranks
            )
        self._processes.append(process)

    def _accept(self, listener: socket.socket, deadline: float) -> Connection:
        """Waits for a rank to connect, or for a process to end too early."""
        ends = [os.pidfd_open(process.pid) for process in self._processes]
        try:
            ready = wait([listener, *ends], max(0.0, deadline - time.monotonic()))
        finally:
            for descriptor in ends:
                os.close(descriptor)
        if listener in ready:
            return Connection(listener.accept()[0].detach())
        raise _Trouble("a process ended before its rank was there" if ready else "no rank came in time")

    # -- Talk --------------------------------------------------------------------------------------------------

    def _receive(self, timeout_seconds: float, kind: str) -> list[Any]:
        """Returns the value of one message of each connection."""
        deadline = time.monotonic() + timeout_seconds
        answers: dict[Connection, Any] = {}
        while len(answers) < self._ranks:
            waiting = [connection for connection in self._connections if connection not in answers]
            ready = wait(waiting, max(0.0, deadline - time.monotonic()))
            if not ready:
                raise _Trouble(f"no answer within {timeout_seconds:.0f} s")
            for connection in waiting:
                if connection in ready:
                    answers[connection] = self._receive_one(connection, kind)
        return [answers[connection] for connection in self._connections]

    def _receive_one(self, connection: Connection, kind: str) -> Any:
        try:
            told, value = connection.recv()
        except EOFError:
            raise _Trouble("a rank is gone") from None
        if told == FAILURE:
            self._last_words.append(value)
            raise _Trouble("a rank failed")
        if told != kind:
            raise _Trouble(f"a rank said {told!r} in place of {kind!r}")
        return value

    # -- End ---------------------------------------------------------------------------------------------------

    def _failure(self, trouble: str) -> CrewFailed:
        """Ends the ranks; returns the error with their output."""
        self._hear_last_words()
        self._end(0)
        if not self._last_words and self._log.exists():
            self._last_words = self._log.read_text(errors="replace").splitlines()[-_LAST_LINES:]
        return CrewFailed(f"{self.system}: {trouble}", self._last_words)

    def _hear_last_words(self) -> None:
        """A lost rank is often only a consequence: the other one may be about to report the cause."""
        deadline = time.monotonic() + _LAST_WORDS_SECONDS
        for connection in self._connections:
            with contextlib.suppress(_Trouble, OSError):
                while connection.poll(max(0.0, deadline - time.monotonic())):
                    self._receive_one(connection, ANSWER)

    def _end(self, patience_seconds: float) -> list[int]:
        """Closes the connections, upon which ranks end; kills ranks that do not. May be repeated.

        Returns:
            The exit codes of the processes that were started; of a repeated call none.
        """
        while self._connections:
            self._connections.pop().close()
        deadline = time.monotonic() + patience_seconds
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        self._kill_ranks()
        processes, self._processes = self._processes, []
        return [_stop(process) for process in processes]

    def _kill_ranks(self) -> None:
        while self._rank_descriptors:
            descriptor = self._rank_descriptors.pop()
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            os.close(descriptor)


def _stop(process: subprocess.Popen[bytes]) -> int:
    """Ends a process that started ranks, which ends what is left of them; returns its exit code."""
    process.terminate()  # does nothing if it has ended
    try:
        return process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):  # with its session, and so its children
            os.killpg(process.pid, signal.SIGKILL)
        return process.wait()
