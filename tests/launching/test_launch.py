"""gs.launch, with what launchers of functions offer elsewhere: NVIDIA's launch, its errors and set_start_method."""

import contextlib
import functools
import multiprocessing
import os
import pickle
import signal
import sys
import threading

import pytest

import gradsync as gs
from commands import wait_until


def test_each_worker_has_its_own_variables_and_the_caller_keeps_its_own(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    before, during = dict(os.environ), []

    def look():
        with open(tmp_path / "fifo", "w"):  # waits until a rank is there
            during.append(dict(os.environ))

    def work(path):
        if os.environ["RANK"] == "0":
            open(path).close()
        return dict(os.environ)

    looker = threading.Thread(target=look, daemon=True)
    looker.start()
    results = gs.launch(work, str(tmp_path / "fifo"), 2, "localhost", 4321)
    looker.join(60)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    for rank, variables in enumerate(results):
        assert [variables[name] for name in names] == [str(rank), str(rank), "2", "2", "localhost", "4321"]
        assert "OMP_NUM_THREADS" in variables
        assert "GRADSYNC_SECRET" not in variables
        assert variables["GRADSYNC_SECRET_FILE"].startswith("fd:")
    assert during == [before]
    assert dict(os.environ) == before


FAILURES = {
    # what the worker does: (exitcode, a word of the report)
    "os.kill(os.getpid(), 9)": (-9, "SIGKILL"),
    "threading.Thread(target=threading.Event().wait).start(); raise ValueError('with a thread')": (1, "with a thread"),
}


@pytest.mark.parametrize("statement", FAILURES)
def test_worker_error_names_the_worker_that_failed(statement):
    def work(statement):
        if os.environ["RANK"] == "1":
            exec(statement, {"os": os, "threading": threading})
        while True:
            signal.pause()

    with pytest.raises(gs.WorkerError) as caught:
        gs.launch(work, statement, 2)
    code, word = FAILURES[statement]
    error = pickle.loads(pickle.dumps(caught.value))
    assert (error.exitcode, error.worker_id, error.msg) == (code, 1, str(error))
    assert error.msg.splitlines()[0] == f"worker[1] failed with exitcode={code}"
    assert word in error.msg
    assert "gradsync/launching" not in error.msg  # of a traceback only what is the user's
    assert isinstance(error, gs.GradsyncError)
    assert isinstance(error, multiprocessing.ProcessError)


def launch_it(function, **options):
    return gs.launch(function, nprocs=1)


def spawn_it(function, **options):
    return [queue.get() for queue in gs.spawn(function, nprocs=1, **options).return_queues]


def decorate_it(function, **options):
    return gs.launcher(function, n_gpus=1, **options)()


STARTS = {"launch": launch_it, "spawn": spawn_it, "launcher": decorate_it}


@pytest.fixture
def _start_method():
    yield
    gs.set_start_method("spawn")


@pytest.mark.usefixtures("_start_method")
@pytest.mark.parametrize(("start", "default", "options"), [
    ("launch", "fork", {}),
    ("spawn", "spawn", {"start_method": "forkserver"}),
    ("launcher", "forkserver", {}),
])  # fmt: skip
def test_every_start_method_is_accepted_and_ranks_are_fresh_processes(start, default, options, caplog, monkeypatch):
    """With fork and forkserver each launch warns that what was set before is not copied."""
    monkeypatch.setattr(sys, "set_before_the_launch", True, raising=False)
    gs.set_start_method(default)
    assert STARTS[start](lambda: hasattr(sys, "set_before_the_launch"), **options) == [False]
    [line] = [record.message for record in caplog.records]
    assert line.startswith(f"{start}: ")
    assert "fork" in line


def test_objects_of_multiprocessing_reach_the_ranks():
    spawn = multiprocessing.get_context("spawn")
    numbers, lock = spawn.Queue(), spawn.Lock()

    def work(numbers, lock):
        with lock:
            numbers.put(int(os.environ["RANK"]))

    gs.launch(functools.partial(work, numbers, lock), nprocs=2)
    assert sorted(numbers.get(timeout=30) for _ in range(2)) == [0, 1]
    numbers.close()
    numbers.join_thread()


def one(_=None):
    return 1


def test_without_a_number_there_is_a_rank_for_each_core(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    usable = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(usable)})
    try:
        assert gs.launch(lambda *arguments: arguments, (1, "a tuple")) == [((1, "a tuple"),)]
        assert len(gs.spawn(one).processes) == 1
        assert gs.launcher(lambda: gs.get_communicator().backend)() == ["local"]
    finally:
        os.sched_setaffinity(0, usable)


def test_a_rank_cannot_launch():
    def work():
        refused = []
        for name, start in STARTS.items():
            try:
                start(one)
            except gs.InvalidArgument:
                refused.append(name)
        return refused

    assert gs.launch(work, (), 1) == [list(STARTS)]


# For each variable, what is refused: gs.launch refuses what its ranks would.
BAD_VALUES = {
    "GRADSYNC_ALLOW_SHARED_GPU": ["true", "2"],
    "GRADSYNC_COLLECTIVE_TIMEOUT_SECONDS": ["0", "-1", "nan", "inf", "soon"],
    "GRADSYNC_LOG": ["loud"],
    "GRADSYNC_FLIGHT_RECORDER_ENTRIES": ["0", "1000001", "many", "1_0", "٣"],
    "GRADSYNC_STATE_DIR": ["removed"],
}


@pytest.mark.parametrize("name", BAD_VALUES)
def test_a_variable_that_ranks_would_refuse_is_refused_before(name, monkeypatch):
    for value in BAD_VALUES[name]:
        monkeypatch.setenv(name, value)
        for call in (gs.init_process_group, *(functools.partial(start, one) for start in STARTS.values())):
            with pytest.raises(gs.InvalidArgument, match=name):
                call()


REFUSED = {
    "launch of no function": lambda: gs.launch(None, (), 2),
    "launch of a tuple that may be meant as arguments": lambda: gs.launch(one, (5,), 2),
    "launch of 0": lambda: gs.launch(one, (), 0),
    "launch of True": lambda: gs.launch(one, (), True),
    "launch of what does not pickle": lambda: gs.launch(one, threading.Lock(), 2),
    "launch of a function with a lock": lambda: gs.launch(functools.partial(one, threading.Lock()), (), 2),
    "start method": lambda: gs.set_start_method("thread"),
    "spawn of no function": lambda: gs.spawn(None),
    "spawn with args that are no tuple": lambda: gs.spawn(one, 5),
    "spawn with args that are text": lambda: gs.spawn(one, "text"),
    "spawn of 0": lambda: gs.spawn(one, (), 0),
    "spawn of True": lambda: gs.spawn(one, (), True),
    "spawn with an unknown option": lambda: gs.spawn(one, zzz=1),
    "spawn with a start method": lambda: gs.spawn(one, start_method="thread"),
    "spawn with a backend": lambda: gs.spawn(one, backend="ucc"),
    "spawn with an empty address": lambda: gs.spawn(one, (), 1, ips=[""]),
    "spawn with an address elsewhere": lambda: gs.spawn(one, nprocs=1, ips="127.0.0.1,192.0.2.1"),
    "launcher of a number": lambda: gs.launcher(3),
    "launcher of 0": lambda: gs.launcher(n_gpus=0),
    "launcher beyond the world": lambda: gs.launcher(n_gpus=4, world_size=2),
    "launcher that starts behind the world": lambda: gs.launcher(world_size=2, rank_start=2, port=4000),
    "launcher of one of several nodes without world_size": lambda: gs.launcher(rank_start=2, port=4000),
    "launcher of another node without the port": lambda: gs.launcher(n_gpus=2, world_size=4, rank_start=2),
    "launcher with rank_start": lambda: gs.launcher(rank_start=-1),
    "launcher with master_ip": lambda: gs.launcher(master_ip=""),
    "launcher with port": lambda: gs.launcher(port=-1),
    "launcher with a backend": lambda: gs.launcher(backend="ucc"),
    "launcher with a start method": lambda: gs.launcher(start_method="thread"),
    "launcher with a device": lambda: gs.launcher(device_type="tpu"),
    "launcher of NCCL on CPUs": lambda: gs.launcher(device_type="cpu", backend="nccl"),
    "launcher's argument": lambda: gs.launcher(one, n_gpus=1)(sys.stdout),
}


@pytest.mark.parametrize("call", REFUSED)
def test_a_mistake_is_refused_before_any_process_starts(call):
    """In a rank it would be another class of error."""
    with pytest.raises(gs.InvalidArgument):
        REFUSED[call]()


def test_a_start_leaves_nothing_in_the_process():
    """No descriptor, thread, child or handler, after success and after failure."""

    def fail():
        raise SystemExit(1)

    def left():
        handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
        links = []
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                links.append((name, os.readlink(f"/proc/self/fd/{name}")))
        with open(f"/proc/self/task/{threading.get_native_id()}/children") as children:
            return sorted(links), handlers, children.read(), signal.pthread_sigmask(signal.SIG_BLOCK, ())

    def use_all():
        gs.launch(one, (), 1)
        gs.spawn(one, (), 1, join=False).join()
        with pytest.raises(gs.WorkerError):
            gs.launch(fail, (), 1)
        with pytest.raises(gs.RankFailed):
            gs.spawn(fail, (), 1, join=False).join()

    use_all()  # what is loaded once stays open
    before, threads = left(), set(threading.enumerate())
    use_all()
    wait_until(lambda: set(threading.enumerate()) <= threads, "the end of the threads")
    wait_until(lambda: left() == before, f"{before}, but {left()}")


# -- Where functions come from -----------------------------------------------------------------------------------------

FUNCTIONS = """
import gradsync as gs
class Point:
    def __init__(self, x): self.x = x
def work(x): return Point(x + 1), __name__
@gs.launcher(n_gpus=1)
def decorated(point): return Point(point.x + gs.get_communicator().world_size)
"""
CALLS = """
number = 7
assert [(point.x, type(point) is Point) for point, _ in gs.launch(work, 1, 1)] == [(2, True)]
assert [(point.x, type(point) is Point) for point in decorated(Point(1))] == [(2, True)]
assert [point.x for point in gs.launcher(lambda make: make(1), 1)(lambda x: Point(x + number))] == [8]
print("right")
"""


def guarded(text):
    return "if __name__ == '__main__':" + text.replace("\n", "\n    ") + "\n"


@pytest.mark.parametrize(
    "way", [*("package", "-"), *(pytest.param(way, marks=pytest.mark.slow) for way in ("-m package", "script"))]
)
def test_functions_of_any_program_can_be_launched(way, cli, tmp_path):
    """Named ones, classes, lambdas; decorated or not. A program that is piped in has no file for ranks to import."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    for path in (tmp_path / "script.py", tmp_path / "package" / "__main__.py"):
        path.write_text(FUNCTIONS + guarded(CALLS))
    arguments = {
        "script": ["script.py"],
        "package": ["package"],
        "-m package": ["-m", "package"],
        "-": ["-"],
    }[way]
    done = cli.python(*arguments, cwd=tmp_path, typed=FUNCTIONS + CALLS if way == "-" else "")
    assert done == (0, "right\n", "")


def test_functions_can_be_launched_under_the_debugger(cli, script):
    path = script(FUNCTIONS + guarded("\nprint(len(gs.launch(work, 1, 2)))"))
    assert "\n2\n" in cli.python("-m", "pdb", path, typed="c\nq\n").out.replace("(Pdb) ", "\n")


@pytest.mark.parametrize(
    "text", ["def work(): pass\ngs.launch(work, (), 2)", "@gs.launcher(n_gpus=1)\ndef below(): pass\nbelow()"]
)
def test_what_ranks_cannot_find_is_said_with_its_right_position(text, cli, script):
    done = cli.python(script("import gradsync as gs\n" + guarded("\n" + text)))
    assert done.code == 1
    assert "above the `if __name__` line" in done.err.splitlines()[-1]


def test_ranks_run_the_interpreter_that_multiprocessing_would_take(cli, script):
    """In an application with Python inside, sys.executable is the application, or nothing."""
    path = script(
        """
        import multiprocessing, sys
        import gradsync as gs
        if __name__ == "__main__":
            multiprocessing.set_executable(sys.executable)
            sys.executable = "/bin/echo"
            print(gs.launch(abs, -2, 2))
        """
    )
    assert cli.python(path)[:2] == (0, "[2, 2]\n")


@pytest.mark.slow  # importing torch
def test_a_program_that_has_used_openmp_can_launch_by_the_name_of_fork(cli, script):
    """A forked copy would hang: the threads of GNU's OpenMP are not in it."""
    pytest.importorskip("torch")
    path = script(
        """
        import torch
        import gradsync as gs

        def work(_):
            big = torch.ones(1500, 1500)
            return float((big @ big).sum())

        if __name__ == "__main__":
            torch.set_num_threads(2)
            wanted = work(0)
            gs.set_start_method("fork")
            print(gs.launch(work, 0, 2) == [wanted] * 2)
        """
    )
    assert cli.python(path).out == "True\n"
