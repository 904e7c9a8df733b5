"""The controller's end of one pair of ranks: starts them, asks both the same, ends them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

from peers.collectives import RANKS
from peers.messages import Failure, Hello
from peers.systems import BENCHMARKS, THREADS, Start, starts

START_SECONDS = 120.0
ANSWER_SECONDS = 600.0
END_SECONDS = 20.0
# How long the cause of a failure may take to arrive behind its first sign.
LAST_WORDS_SECONDS = 2.0
LAST_LINES = 20


class PairFailed(RuntimeError):
    """The ranks of a system did not start, failed, or did not answer; they have been ended."""


class _Trouble(Exception):
    """What went wrong as the controller sees it; the ranks may know more."""


class Pair:
    """Two ranks of one system, asleep unless asked for something. A context: they end with it.

    Args:
        system: one of SYSTEMS.
        folder: private to this run, with a path short enough for a socket in it.

    Raises:
        PairFailed: they did not start.

    Attributes:
        system: as given.
        versions: what the ranks run on.
        pids: of the ranks' processes, by rank.
    """

    def __init__(self, system: str, folder: str) -> None:
        self.system = system
        self._log = Path(folder) / f"{system}.log"
        self._processes: list[subprocess.Popen[bytes]] = []
        self._rank_descriptors: list[int] = []
        self._connections: list[Connection] = []  # by rank
        self._last_words: list[str] = []
        try:
            hellos = self._meet(str(Path(folder) / system))
            self.versions = hellos[0].versions
            self.pids = [hello.pid for hello in hellos]
        except (_Trouble, OSError) as error:
            raise self._failure(f"did not start: {error}") from error
        except BaseException:
            self._end(0)
            raise

    def ask(self, method: str, *arguments: object) -> list[Any]:
        """Calls a method of Requests (rank.py) on both ranks at once.

        Returns:
            The answers by rank.

        Raises:
            PairFailed: a rank failed, or did not answer in ANSWER_SECONDS.
        """
        try:
            for connection in self._connections:
                connection.send((method, *arguments))
            return self._receive(ANSWER_SECONDS)
        except (_Trouble, OSError) as error:
            raise self._failure(f"asked for {method}: {error}") from error

    def __enter__(self) -> Pair:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        exit_codes = self._end(END_SECONDS)
        if error is None and any(exit_codes):
            raise self._failure(f"ended with exit codes {exit_codes}")

    # -- Start -------------------------------------------------------------------------------------------------

    def _meet(self, address: str) -> list[Hello]:
        """Starts the ranks and waits until they have met one another; returns what they say, by rank."""
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen(RANKS)
            for start in starts(self.system, address):
                self._start(start)
            deadline = time.monotonic() + START_SECONDS
            while len(self._connections) < RANKS:
                self._connections.append(self._accept(listener, deadline))
        hellos: list[Hello] = self._receive(deadline - time.monotonic())
        self._rank_descriptors = [os.pidfd_open(hello.pid) for hello in hellos]
        order = sorted(range(RANKS), key=lambda index: hellos[index].rank)
        self._connections = [self._connections[index] for index in order]
        return [hellos[index] for index in order]

    def _start(self, start: Start) -> None:
        with self._log.open("ab") as log:
            process = subprocess.Popen(
                start.command,
                cwd=BENCHMARKS,
                # Open MPI and PyTorch keep folders where temporary files go, and leave them.
                env={**os.environ, **THREADS, "TMPDIR": str(self._log.parent), **start.variables},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the controller, which ends the ranks in order
            )
        self._processes.append(process)

    def _accept(self, listener: socket.socket, deadline: float) -> Connection:
        """Waits for a rank, or for the end of a process that should have brought one."""
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

    def _receive(self, timeout_seconds: float) -> list[Any]:
        """Returns one message of each connection."""
        deadline = time.monotonic() + timeout_seconds
        answers: dict[Connection, Any] = {}
        while len(answers) < RANKS:
            waiting = [connection for connection in self._connections if connection not in answers]
            ready = wait(waiting, max(0.0, deadline - time.monotonic()))
            if not ready:
                raise _Trouble(f"no answer within {timeout_seconds:.0f} s")
            answers.update({connection: self._receive_one(connection) for connection in ready})
        return [answers[connection] for connection in self._connections]

    def _receive_one(self, connection: Connection) -> Any:
        try:
            message = connection.recv()
        except EOFError:
            raise _Trouble("a rank is gone") from None
        if isinstance(message, Failure):
            self._last_words.append(message.traceback_text)
            raise _Trouble("a rank failed")
        return message

    # -- End ---------------------------------------------------------------------------------------------------

    def _failure(self, trouble: str) -> PairFailed:
        """Ends the ranks; returns the error, with what they have to say."""
        self._hear_last_words()
        self._end(0)
        if not self._last_words and self._log.exists():
            self._last_words = self._log.read_text(errors="replace").splitlines()[-LAST_LINES:]
        return PairFailed("\n".join([f"{self.system}: {trouble}", *self._last_words]))

    def _hear_last_words(self) -> None:
        """A rank that is gone often is only the consequence: the other one may be about to tell why."""
        deadline = time.monotonic() + LAST_WORDS_SECONDS
        for connection in self._connections:
            with contextlib.suppress(_Trouble, OSError):
                while connection.poll(max(0.0, deadline - time.monotonic())):
                    self._receive_one(connection)

    def _end(self, patience_seconds: float) -> list[int]:
        """Hangs up, so that the ranks end by themselves; ends those that do not. May be repeated.

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
    process.terminate()  # does nothing where it has ended
    try:
        return process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
