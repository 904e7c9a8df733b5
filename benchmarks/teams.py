"""Who measures: teams of rank processes, which sleep until it is their turn.

pytest starts a team for each system that takes part (gradsync, PyTorch, MPI, the gradsync of another commit), and is no
rank itself. Each rank holds a connection to pytest. A request prepares a contender's step, times it, or lets it go; it
goes to all ranks of a team at once. Where a launcher has started pytest (mpiexec, srun, gradsync run), the ranks of
that job are the only team: pytest runs on rank 0, and the others follow it.
"""

from __future__ import annotations

import gc
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import cloudpickle

import gradsync as gs
import systems
from systems import Absent, Step

START_SECONDS = 120.0
ANSWER_SECONDS = 600.0
END_SECONDS, HURRY_SECONDS = 20.0, 2.0
ROOT = Path(__file__).resolve().parents[1]
Make = Callable[..., Step]  # make(contender, *arguments)


class RanksFailed(Exception):
    """A rank of a team failed, or did not answer; with its traceback. The team is gone."""


def kernels() -> str:
    """Returns which kernels of shared memory run in this process: those in "C" or in "NumPy"."""
    try:
        from gradsync.communicators.shared_memory.compiled import RUNNING
    except ModuleNotFoundError:  # a commit of --against from before there were any in C
        return "NumPy"
    return RUNNING.kind


# -- On each rank -----------------------------------------------------------------------------------------------------


class Rank:
    """The steps of a rank. Without `comm` it is the process of pytest, for steps that need no ranks."""

    backend = "none"

    def __init__(self, comm: gs.Communicator | None = None) -> None:
        self._comm = comm
        self._steps: dict[str, Step] = {}

    def prepare(self, make: Make, contender: str, *arguments: Any) -> None:
        self._steps[contender] = make(contender, *arguments)

    def time(self, contender: str, calls: int) -> float:
        """Returns the seconds of a call. A step that returns a float has timed itself, and is called once."""
        step = self._steps[contender]
        if self._comm is not None:
            self._comm.barrier()
        began = time.perf_counter()
        for _ in range(calls):
            result = step()
        seconds = time.perf_counter() - began
        return result if isinstance(result, float) else seconds / calls

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)

    def release(self) -> None:
        self._steps.clear()
        gc.collect()

    def ask(self, what: str, *arguments: Any) -> list[Any]:
        """Does what Team.ask says, and returns the one result."""
        return [getattr(self, what)(*arguments)]

    def answer(self, request: bytes) -> tuple[str, Any]:
        try:
            return "done", self.ask(*pickle.loads(request))[0]
        except Absent as absent:
            return "absent", str(absent)
        except Exception:
            return "failed", traceback.format_exc()


def follow(comm: gs.Communicator) -> None:
    """Runs on the ranks of a launched job, but not on rank 0, which runs pytest."""
    rank = Rank(comm)
    while (request := comm.objects.broadcast(None, root=0)) is not None:
        answer = rank.answer(request)
        if answer[0] == "failed":  # the others may wait for this rank, and fail before they hear why
            print(f"rank {comm.rank}: {answer[1]}", file=sys.stderr)
        comm.objects.all_gather(answer)


def main(address: str, source: str) -> None:
    """Runs on each rank that pytest has started."""
    if not str(gs.__file__).startswith(source):
        raise ImportError(f"the ranks were to import gradsync from {source}, and import {gs.__file__}")
    with systems.comm() as comm, socket.socket(socket.AF_UNIX) as stream:
        stream.connect(address)
        rank, connection = Rank(comm), Connection(stream.detach())
        connection.send((comm.rank, comm.backend, kernels()))
        with suppress(EOFError):  # pytest has ended, or wants this rank no more
            while True:
                connection.send(rank.answer(connection.recv_bytes()))


# -- In the process of pytest -----------------------------------------------------------------------------------------


def results_of(answers: Sequence[tuple[str, Any]]) -> list[Any]:
    """Returns what the ranks answered.

    Raises:
        RanksFailed, Absent: what a rank answered.
    """
    for rank, (kind, value) in enumerate(answers):
        if kind == "failed":
            raise RanksFailed(f"rank {rank}: {value}")
    for kind, value in answers:
        if kind == "absent":
            raise Absent(value)
    return [value for _, value in answers]


class Launched:
    """The ranks of the job that pytest is rank 0 of."""

    def __init__(self, comm: gs.Communicator) -> None:
        self.backend = comm.backend
        self._comm, self._rank = comm, Rank(comm)

    def ask(self, *request: Any) -> list[Any]:
        data = self._comm.objects.broadcast(cloudpickle.dumps(request), root=0)
        return results_of(self._comm.objects.all_gather(self._rank.answer(data)))

    def close(self) -> None:
        if not self._comm.closed:
            self._comm.objects.broadcast(None, root=0)


class Team:
    """Ranks that pytest has started.

    Args:
        launcher: what starts the ranks, without the program.
        ranks: how many.
        source: the folder that gradsync is imported from.
        variables: beside those of this process.

    Raises:
        RanksFailed: they did not start.
    """

    def __init__(self, launcher: Sequence[str], ranks: int, source: Path, variables: Mapping[str, str]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        address = f"{self._folder.name}/pytest"
        paths = [str(source), str(ROOT / "benchmarks"), str(ROOT / "examples"), os.environ.get("PYTHONPATH", "")]
        path = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        self._log = Path(self._folder.name, "log")
        self._connections: list[Connection] = []
        with socket.socket(socket.AF_UNIX) as listener, self._log.open("wb") as log:
            listener.bind(address)
            listener.listen(ranks)
            listener.settimeout(0.2)
            self._process = subprocess.Popen(
                [*launcher, __file__, address, str(source)],
                env=os.environ | systems.VARIABLES | variables | path,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for pytest, which ends the ranks
            )
            try:
                self._meet(listener, ranks)
            except (RanksFailed, EOFError, OSError) as error:
                raise RanksFailed(f"{str(error) or 'a rank has ended'}\n{self.close()}") from None
            except BaseException:
                self.close()
                raise

    def _meet(self, listener: socket.socket, ranks: int) -> None:
        deadline = time.monotonic() + START_SECONDS
        by_rank: dict[int, Connection] = {}
        while len(by_rank) < ranks:
            with suppress(TimeoutError):
                stream, _ = listener.accept()
                stream.setblocking(True)
                connection = Connection(stream.detach())
                self._connections.append(connection)
                rank, self.backend, self.kernels = connection.recv()
                by_rank[rank] = connection
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RanksFailed(f"{len(by_rank)} of {ranks} ranks have started")
        self._connections = [by_rank[rank] for rank in range(ranks)]

    def ask(self, *request: Any) -> list[Any]:
        """Lets all ranks do something at once, and returns their results, by rank.

        Raises:
            Absent: the contender cannot take part.
            RanksFailed: a rank failed, or did not answer in time.
        """
        answers: list[tuple[str, Any]] = [("", None)] * len(self._connections)
        waiting = {connection: rank for rank, connection in enumerate(self._connections)}
        deadline = time.monotonic() + ANSWER_SECONDS
        try:
            data = cloudpickle.dumps(request)
            for connection in waiting:
                connection.send_bytes(data)
            while waiting:
                ready = wait(list(waiting), max(deadline - time.monotonic(), 0.0))
                if not ready:
                    raise RanksFailed(f"no answer within {ANSWER_SECONDS:.0f} s to {request[0]}")
                for connection in ready:
                    rank = waiting.pop(connection)
                    kind, value = answers[rank] = connection.recv()
                    if kind == "failed":  # the others may wait for this rank for ever
                        raise RanksFailed(f"rank {rank}: {value}")
            return results_of(answers)
        except (RanksFailed, EOFError, OSError) as error:
            raise RanksFailed(f"{str(error) or 'a rank has ended'}\n{self.close()}") from None

    @property
    def ended(self) -> bool:
        return not self._connections

    def close(self, *, hurry: bool = False) -> str:
        """Ends the ranks, and returns their last lines. They end with their connections, unless something hangs."""
        patience = HURRY_SECONDS if hurry else END_SECONDS
        for connection in self._connections:
            connection.close()
        self._connections = []
        try:
            self._process.wait(patience if self._process.poll() is None else 0)
        except subprocess.TimeoutExpired:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(patience)
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        last_lines = self._log.read_text(errors="replace").splitlines()[-30:] if self._log.exists() else []
        self._folder.cleanup()
        return "\n".join(last_lines)


AnyTeam = Rank | Launched | Team


class Teams:
    """All teams of a session, started when they are first needed.

    Args:
        ranks: of a team, if a row does not say.
        commits: of --against: a contender each, with the name of the commit.
        starts: how often the ranks of a row are started anew. The place of its memory makes a process faster than
            another for its whole life, by several per cent, and by a fifth where arrays are new in each step.
        launched: the ranks of the job, if a launcher has started pytest.
    """

    def __init__(self, ranks: int, commits: Sequence[str], starts: int, launched: Launched | None) -> None:
        self.ranks, self.commits, self.starts = ranks, commits, starts
        self._launched, self._here = launched, Rank()
        self._teams: dict[Any, Team] = {}
        self._failed: str | None = None
        self.kernels: dict[str, str] = {}  # which ones the ranks of a contender ran
        self.hurry = False  # after Ctrl-C
        # The paths to gradsync have the same length: they shift the memory of a process.
        self._folder = tempfile.TemporaryDirectory(prefix="against-")
        self._sources = {commit: Path(self._folder.name, commit) for commit in commits}
        for commit, folder in self._sources.items():
            archive = f"{folder}.tar"
            subprocess.run(["git", "-C", str(ROOT), "archive", "--output", archive, commit], check=True)
            shutil.unpack_archive(archive, folder, filter="data")
            if (folder / "setup.py").exists():  # its kernels in C
                build = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
                subprocess.run(build, cwd=folder, check=True)
        self._checkout = Path(self._folder.name, "checkout") if commits else ROOT
        if commits:
            shutil.copytree(ROOT / "src", self._checkout / "src")

    def of(self, contender: str, ranks: int | None, variables: Mapping[str, str]) -> AnyTeam:
        """Returns the team of a contender; without ranks, the process of pytest.

        Raises:
            Absent: what it needs is not installed.
        """
        if ranks == 0:
            return self._here
        if self._failed:
            raise RanksFailed(f"the ranks are gone since this failed: {self._failed}")
        if self._launched is not None:
            if ranks not in (None, self.ranks) or variables:
                raise Absent("this row starts ranks of its own: run it without a launcher")
            return self._launched
        system, count = systems.SYSTEMS.get(contender, "gradsync"), ranks or self.ranks
        source = self._sources.get(contender, self._checkout) / "src"
        key = system, source, count, tuple(variables.items())
        if key not in self._teams or self._teams[key].ended:
            try:
                self._teams[key] = Team(systems.launcher_of(system, count), count, source, variables)
            except RanksFailed as error:
                if contender in self.commits:  # an old one may need another Python, or have another command line
                    raise Absent(
                        f"gradsync at {contender} does not start here: {str(error).splitlines()[-1]}"
                    ) from None
                raise
        if system == "gradsync":
            self.kernels[contender] = self._teams[key].kernels
        return self._teams[key]

    def end(self) -> None:
        """Ends the teams that pytest has started; who is needed again is started again."""
        for team in self._teams.values():
            team.close(hurry=self.hurry)
        self._teams.clear()

    def failed(self, row: str) -> None:
        """Ends all teams after a failure; ranks that pytest has not started cannot be started again."""
        if self._launched is not None:
            self._failed = self._failed or row
        self.end()

    def close(self) -> None:
        self.end()
        if self._launched is not None and not self._failed:
            self._launched.close()
        self._folder.cleanup()


if __name__ == "__main__":
    main(*sys.argv[1:])
