"""Runs the body of a test on rank processes: `@pytest.mark.ranks`.

    @pytest.mark.ranks(2, 3, on=("shm", "fake"))
    def test_all_reduce_sums(comm): ...

is four tests. In each the body runs on every rank, and `comm` is that rank's communicator of the world. The rank
processes stay for the next test of that kind, so a test costs milliseconds. They are killed when a body raises on any
rank, and the test fails with the error of the rank that failed first and the tracebacks of all.

Arguments of the marker:

    *sizes         numbers of ranks
    on             where they run, see PLACES; a mapping gives the numbers of ranks of each place
    fresh=True     processes of this test alone: for a body that changes a process or breaks its communicator
    ends={2: -9}   rank 2 ends itself by signal 9 (or with that exit code); implies `fresh`
    options={}     keyword arguments of init_process_group
    environment={} variables of the rank processes

A test with an argument `rank` in place of `comm` is for what happens before: each process has the variables of its
rank, and calls gs.init_process_group itself. An argument `place` is the name of the place. The other arguments of a
test are sent to the ranks: parameters, tmp_path, whatever pickles.

The fixture `run_on_ranks` calls a function on pooled ranks, and gives its results.
"""

from __future__ import annotations

import importlib.util
import inspect
import multiprocessing
import os
import pickle
import secrets
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
import pytest

import gradsync as gs
from gradsync import backends, errors
from gradsync.rendezvous.server import RendezvousServer  # as gradsync's launcher hosts it: rank 0 may die as any other
from real_cupy import harness as cupy_over_host_memory

TESTS = Path(__file__).parent
_MAX_POOLS = 4  # that one pytest process keeps
_OTHERS_FAIL_SECONDS = 10.0  # how long the others may take to fail, too, once one has

_OF_LAUNCHERS = "GRADSYNC_", "RANK", "WORLD_SIZE", "LOCAL_", "TORCHELASTIC_"
_context = multiprocessing.get_context("forkserver")
# What each rank would import anew: most of what an empty one costs.
_context.set_forkserver_preload(
    [
        *("numpy", "numpy.random", "pytest", "ml_dtypes", "cloudpickle", "ranks", "arrays", "gradsync.__main__"),
        *("gradsync.process_group", "gradsync.bucketing.callback", "gradsync.bucketing.trees", "gradsync.consistency"),
        *("gradsync.communicators.shared_memory.backend", "gradsync.communicators.local"),
    ]
)


class Place(NamedTuple):
    """Where ranks run: what they give init_process_group, their variables, and how their processes start.

    Attributes:
        options: for init_process_group.
        environment: variables of the rank processes.
        folders: for the front of their sys.path.
        command: what starts all of them, as mpiexec, given their number; None: this process forks them.
        new_python: gives the variables with which each rank needs a new Python, when one starts; None: forks will do.
        mark: of its tests; only `-m` with this name runs them.
    """

    options: dict[str, Any]
    environment: dict[str, str] = {}  # noqa: RUF012 - never changed
    folders: tuple[str, ...] = ()
    command: Callable[[int], list[str]] | None = None
    new_python: Callable[[], dict[str, str]] | None = None
    mark: str = ""


def _mpiexec() -> str:
    """The one beside this Python, else the first on PATH."""
    beside = os.path.dirname(sys.executable)
    return shutil.which("mpiexec", path=os.pathsep.join([beside, os.environ.get("PATH", "")])) or "mpiexec"


PLACES = {
    "local": Place({"backend": "local"}),
    "shm": Place({"backend": "shm"}),
    "pipes": Place({"backend": "pipes"}, folders=(str(TESTS / "backends"),)),
    "fake": Place({"backend": "nccl"}, {"FAKE_CUPY_DEVICES": "8"}, folders=(str(TESTS / "fake_cupy"),)),
    "debug": Place(
        {"backend": "nccl"},
        {"FAKE_CUPY_DEVICES": "8", "GRADSYNC_DEBUG": "1"},
        folders=(str(TESTS / "fake_cupy"),),
    ),
    "mpi": Place({"backend": "mpi"}, command=lambda size: [_mpiexec(), "-n", str(size)], mark="mpi"),
    "cupy": Place({"backend": "nccl"}, new_python=cupy_over_host_memory.environment, mark="cupy"),
    "gpu": Place({"backend": "nccl", "allow_shared_gpu": True}, mark="gpu"),
}

#: What each communicator does is tested on these, with their numbers of ranks; SEVERAL: where there are others;
#: ALSO_ALONE: for what a world of one does in a way of its own. The fake costs most, and its third rank finds little: a
#: few tests have one. "pipes" is the backend of docs/architecture.md: what is right for it alone is in the front.
EVERYWHERE = {"local": (1,), "shm": (2, 3), "pipes": (2,), "fake": (2,), "mpi": (1, 2, 3)}
ALSO_ALONE = EVERYWHERE | {"shm": (1, 2, 3), "fake": (1, 2)}
SEVERAL = {"shm": (2, 3), "pipes": (2,), "fake": (2,), "mpi": (2, 3)}
#: Where ranks that call different things are told before data moves.
COMPARED = {"shm": (2, 3), "pipes": (2,), "debug": (2,), "mpi": (2, 3)}
THREE_OF_FAKE = {"fake": (1, 2, 3)}
ON_GPU = {"gpu": (1, 2)}


class Call(NamedTuple):
    """One call for all ranks, perhaps their only one: a function of a test file, and its arguments, pickled."""

    file: str
    module: str
    function: str
    arguments: bytes
    is_only: bool = False


class RankFailures(AssertionError):
    """Ranks that failed with what this process cannot unpickle, or that ended without a word."""


class Ranks:
    """Rank processes that call one function after the other.

    Args:
        place: see PLACES.
        size: number of ranks.
        joins: whether they call init_process_group; else functions get the rank for the communicator.
        options: for init_process_group, beside those of the place.
        environment: variables, beside those of the place.
    """

    def __init__(
        self, place: str, size: int, *, joins: bool = True, options: dict[str, Any], environment: dict[str, str]
    ) -> None:
        self._place, self._size = PLACES[place], size
        self._joins, self._options = joins, {"collective_timeout_seconds": 60.0} | self._place.options | options
        self._environment = self._place.environment | environment
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        self._server: RendezvousServer | None = None

    def run(self, call: Call, *, ends: dict[int, int] | None = None) -> list[Any]:
        """Makes all ranks call it, and gives their results by rank.

        Args:
            call: what they call.
            ends: the ranks that end instead, with their exit codes.

        Raises:
            BaseException: what the rank raised that failed first, with a note of what each rank says.
        """
        __tracebackhide__ = True  # what happened on the ranks says it all
        try:
            if not self._connections:
                self._start()
            for connection in self._connections:
                connection.send(call)
            outcomes = self._outcomes()
        except BaseException:  # also pytest's time-out: the next test must not get these answers
            self.kill()
            raise
        failed = [
            (rank, *rest) for rank, (kind, *rest) in outcomes.items() if kind == "failed" and rank not in (ends or {})
        ]
        failed.sort(key=lambda each: each[3])  # one clock for all processes; answers may come in any order
        early = [rank for rank in ends or {} if outcomes[rank][0] != "failed" or outcomes[rank][1] is not None]
        if failed or early:
            self.kill()
            raise _error_of(failed, early)
        for rank, code in (ends or {}).items():
            ended = _exit_code(self._processes[rank])
            assert ended == code, f"rank {rank}: exit code {ended}"
        skipped = [outcome[1] for outcome in outcomes.values() if outcome[0] == "skipped"]
        if skipped:
            pytest.skip(skipped[0])
        return [outcomes[rank][1] for rank in sorted(outcomes)]

    def close(self, *, apart_from: frozenset[int] = frozenset()) -> None:
        """Has the ranks leave the process group, and end.

        Raises:
            AssertionError: one of them did not end as it should, apart from those.
        """
        for connection in self._connections:
            with suppress(OSError):
                connection.send(None)
        codes = {}
        for rank, process in enumerate(self._processes):
            code = _exit_code(process, 60)
            if code != 0 and rank not in apart_from:
                codes[rank] = code
        self.kill()
        assert not codes, f"exit codes of ranks at their end: {codes}"

    def kill(self) -> None:
        """Kills what is left of them."""
        for process in self._processes:
            with suppress(OSError):
                process.kill()
            _exit_code(process)
            if not isinstance(process, subprocess.Popen):
                process.close()
        for connection in self._connections:
            connection.close()
        if self._server is not None:
            self._server.stop()
        self._processes, self._connections, self._server = [], [], None

    def _start(self) -> None:
        with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"{folder}/ranks")
            listener.listen(self._size)
            arguments = f"{folder}/ranks", self._place.folders, self._joins, self._options
            if self._place.command is not None:
                self._start_command(*arguments)
            else:
                self._fork(*arguments)
            connections: dict[int, Connection] = {}
            failed = []
            for _ in range(self._size):
                connection = self._accept(listener)
                self._connections.append(connection)
                rank, error, text = connection.recv()
                connections[rank] = connection
                if text:
                    failed.append((rank, error, text, time.monotonic()))
            if failed:
                raise _error_of(failed, [])
            self._connections = [connections[rank] for rank in range(self._size)]

    def _fork(self, *arguments: Any) -> None:
        secret = secrets.token_bytes(32)
        self._server = RendezvousServer(self._size, secret=secret)
        self._server.start()
        for rank in range(self._size):
            variables = {
                "RANK": str(rank),
                "WORLD_SIZE": str(self._size),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(self._size),
                "GRADSYNC_ADDRESS": self._server.address,
                "GRADSYNC_SECRET": secret.hex(),
            }
            variables |= self._environment
            if self._place.new_python is not None:
                process: Any = _new_python([], self._place.new_python() | variables, arguments)
            else:
                process = _context.Process(target=serve, args=(variables, *arguments))
                process.start()
            self._processes.append(process)

    def _start_command(self, *arguments: Any) -> None:
        assert self._place.command is not None
        self._processes = [_new_python(self._place.command(self._size), self._environment, arguments)]

    def _accept(self, listener: socket.socket) -> Connection:
        """The connection of the next rank, or the error that a process has ended before."""
        while not select.select([listener], [], [], 0.5)[0]:
            for process in self._processes:
                code = process.poll() if isinstance(process, subprocess.Popen) else process.exitcode
                if code is not None:
                    raise RankFailures(f"a rank process ended with exit code {code} before it could be asked")
        return Connection(listener.accept()[0].detach())

    def _outcomes(self) -> dict[int, tuple[Any, ...]]:
        """Waits for all ranks, or once one has failed for a while."""
        open_ones = {connection: rank for rank, connection in enumerate(self._connections)}
        outcomes: dict[int, tuple[Any, ...]] = {}
        deadline = None
        while open_ones:
            ready = wait(list(open_ones), None if deadline is None else max(0.0, deadline - time.monotonic()))
            for connection in ready:
                rank = open_ones.pop(connection)  # type: ignore[index]
                try:
                    outcomes[rank] = connection.recv()
                except (EOFError, ConnectionResetError):
                    outcomes[rank] = "failed", None, "the rank has ended", time.monotonic()
                if outcomes[rank][0] == "failed" and outcomes[rank][1] is not None and deadline is None:
                    deadline = time.monotonic() + _OTHERS_FAIL_SECONDS
            if not ready:
                outcomes |= dict.fromkeys(open_ones.values(), ("failed", None, "still running", time.monotonic()))
                break
        return outcomes


def become(**variables: object) -> None:
    """Gives this process the variables of another launcher, instead of those by which this kit's ranks meet."""
    for name in [name for name in os.environ if name.startswith(_OF_LAUNCHERS)]:
        del os.environ[name]
    os.environ.update({name: str(value) for name, value in variables.items()})


def _new_python(command: list[str], variables: dict[str, str], arguments: tuple[Any, ...]) -> subprocess.Popen[bytes]:
    """Starts a Python that serves, or the command that starts some."""
    environment = os.environ | variables
    path = os.pathsep.join([str(TESTS), *filter(None, [environment.get("PYTHONPATH")])])
    program = f"import ranks; ranks.serve({{}}, *{arguments!r})"
    return subprocess.Popen([*command, sys.executable, "-c", program], env=environment | {"PYTHONPATH": path})


def _exit_code(process: Any, seconds: float | None = None) -> int | None:
    """Waits for the end of a process; None when it does not end in time."""
    if isinstance(process, subprocess.Popen):
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
        return process.returncode
    process.join(seconds)
    code: int | None = process.exitcode
    return code


def _error_of(failed: list[tuple[int, Any, str, float]], early: list[int]) -> BaseException:
    """The error of the rank that failed first, with what all of them say."""
    error = next((error for _, error, *_ in failed if error is not None), None)
    if error is None:
        error = RankFailures(f"ranks {[rank for rank, *_ in failed] + early} did not end as they should")
    for rank, _, text, _ in failed:
        error.add_note(f"--- rank {rank}:\n{text}")
    for rank in early:
        error.add_note(f"--- rank {rank} should have ended itself")
    return error


# -- In the rank process ----------------------------------------------------------------------------------------------


def serve(
    environment: dict[str, str], path: str, folders: tuple[str, ...], joins: bool, options: dict[str, Any]
) -> None:
    """Joins the others, and calls what comes, until there is no more or a call fails."""
    os.environ.update(environment)
    _add_pipes()
    sys.path[:0] = [*folders, str(TESTS.parent)]  # what is pickled may be of the module tests.folder.test_file
    pipe = socket.socket(socket.AF_UNIX)
    pipe.connect(path)
    with Connection(pipe.detach()) as connection:
        if not joins:
            rank = int(os.environ["RANK"])
            connection.send((rank, None, ""))
            _serve(connection, rank)
            return
        try:
            comm = gs.init_process_group(**options)
        except BaseException as error:
            rank = int(os.environ.get("RANK", os.environ.get("PMI_RANK", "0")))
            connection.send((rank, *_told(error)))
            return
        with comm:
            connection.send((comm.rank, None, ""))
            _serve(connection, comm)
    gs.destroy_process_group()  # one that a body has begun: multiprocessing ends without Python's atexit


def _add_pipes() -> None:
    """A row for pipe_backend. It and the fake CuPy are as if they were installed: their lines are not the user's."""
    backends.TABLE["pipes"] = backends.BackendRow("pipe_backend")
    errors._PACKAGES = (*errors._PACKAGES, "pipe_backend.py", "/fake_cupy/")


def _serve(connection: Connection, comm: Any) -> None:
    while True:
        try:
            call = connection.recv()
        except (EOFError, ConnectionResetError):
            return
        if call is None:
            return
        outcome = _outcome(call, comm)
        has_failed = outcome[0] == "failed"
        try:
            connection.send(outcome)
        except OSError:  # this process is about to be killed
            return
        del outcome  # an error in it holds the test's variables
        if has_failed and not isinstance(comm, int):
            comm.abort("the test failed on this rank")


def _outcome(call: Call, comm: Any) -> tuple[Any, ...]:
    try:
        function = inspect.unwrap(getattr(_module(call), call.function))
        mine = {"rank" if isinstance(comm, int) else "comm": comm}
        result = function(**mine, **pickle.loads(call.arguments))
        if not isinstance(comm, int) and not comm.closed and not call.is_only:
            comm.barrier()  # a body that leaves the ranks out of step fails itself, not the next test
        return "passed", result
    except pytest.skip.Exception as skipped:
        return "skipped", str(skipped)
    except BaseException as error:
        now = time.monotonic()
        return "failed", *_told(error), now


def _module(call: Call) -> Any:
    """The test file as a module, under the name that it has in pytest: arguments may be pickled by that name."""
    if call.module not in sys.modules:
        spec = importlib.util.spec_from_file_location(call.module, call.file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[call.module] = module
        spec.loader.exec_module(module)
    return sys.modules[call.module]


def _told(error: BaseException) -> tuple[BaseException | None, str]:
    """The error, if the other process can have it, and its traceback with the values of the test's own variables."""
    try:
        lines = traceback.TracebackException.from_exception(error, capture_locals=True)
    except Exception:  # the repr of one of them failed
        lines = traceback.TracebackException.from_exception(error)
    for frame in lines.stack:
        if not frame.filename.startswith(str(TESTS)) or frame.filename == __file__:
            frame.locals = None
    text = "".join(lines.format()).encode(errors="backslashreplace").decode()
    try:
        return pickle.loads(pickle.dumps(error)), text
    except Exception:
        return RankFailures(f"{type(error).__name__}: {error}"), text


# -- In pytest --------------------------------------------------------------------------------------------------------

_pools: dict[Any, Ranks] = {}  # the one used last is last


def cases(metafunc: pytest.Metafunc) -> None:
    """One case for each place and number of ranks."""
    marker = metafunc.definition.get_closest_marker("ranks")
    if marker is None:
        return
    name = "rank" if "rank" in metafunc.fixturenames else "comm"
    on = marker.kwargs.get("on", ("shm",))
    places = [(place, size) for place in on for size in (on[place] if isinstance(on, dict) else marker.args)]
    metafunc.parametrize(
        name,
        [
            pytest.param(each, id="-".join(map(str, each)), marks=[pytest.mark.__getattr__(mark)] if mark else [])
            for each in places
            for mark in [PLACES[each[0]].mark]
        ],
    )


def in_order_of_pools(items: list[Any]) -> None:
    """Puts tests on the same kind of pooled ranks one after the other: a few pools are kept, and a start costs most."""
    places = list(PLACES)
    keys: dict[Any, tuple[Any, ...]] = {}
    for item in items:
        marker = item.get_closest_marker("ranks")
        if marker is not None and "comm" in item.callspec.params and not marker.kwargs.keys() & {"fresh", "ends"}:
            place, size = item.callspec.params["comm"]
            settings = [repr(sorted(marker.kwargs.get(key, {}).items())) for key in ("options", "environment")]
            keys[item] = places.index(place), size, settings
    pooled = sorted(keys, key=lambda item: keys[item])
    items[:] = pooled + [item for item in items if item not in keys]


def run_test(item: pytest.Function) -> bool | None:
    """Runs the body of a test with the marker; None for any other test."""
    __tracebackhide__ = True
    marker = item.get_closest_marker("ranks")
    if marker is None:
        return None
    arguments = {name: item.funcargs[name] for name in inspect.signature(item.function).parameters}
    name = "rank" if "rank" in arguments else "comm"
    place, size = arguments.pop(name)
    if "place" in arguments:
        arguments["place"] = place
    call = _call(item.function, item.originalname, arguments)
    ends = marker.kwargs.get("ends", {})
    settings: dict[str, Any] = {key: marker.kwargs.get(key, {}) for key in ("options", "environment")}
    if name == "comm" and not ends and not marker.kwargs.get("fresh"):
        pool(place, size, **settings).run(call)
        return True
    ranks = Ranks(place, size, joins=name == "comm", **settings)
    try:
        ranks.run(call._replace(is_only=True), ends=ends)
        ranks.close(apart_from=frozenset(ends))
    finally:
        ranks.kill()  # also where the body was skipped
    return True


def _call(function: Callable[..., Any], name: str, arguments: dict[str, Any]) -> Call:
    return Call(inspect.getfile(function), function.__module__, name, cloudpickle.dumps(arguments))


def pool(place: str, size: int, *, options: dict[str, Any], environment: dict[str, str]) -> Ranks:
    """Gives the ranks of that kind that are waiting, or new ones."""
    key = place, size, repr(sorted(options.items())), repr(sorted(environment.items()))
    ranks = _pools.pop(key, None) or Ranks(place, size, options=options, environment=environment)
    _pools[key] = ranks
    while len(_pools) > _MAX_POOLS:
        _pools.pop(next(iter(_pools))).close()
    return ranks


def close_pools() -> None:
    """Ends all ranks.

    Raises:
        AssertionError: some did not end as they should.
    """
    while _pools:
        _pools.popitem()[1].close()


@pytest.fixture
def place() -> str:
    """The place where the ranks of a test run; run_test knows it."""
    return ""


@pytest.fixture
def run_on_ranks() -> Callable[..., list[Any]]:
    """run_on_ranks(size, function, *args, on="shm") calls function(comm, *args) on each rank and gives all results.

    For tests that draw examples: a body under @given cannot run on ranks, a call for each example can.
    """

    def run(size: int, function: Callable[..., Any], *args: Any, on: str = "shm") -> list[Any]:
        call = _call(_with_positions, "_with_positions", {"function": function, "args": args})
        return pool(on, size, options={}, environment={}).run(call)

    return run


def _with_positions(comm: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return function(comm, *args)
