import contextlib
import functools
import gc
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import command
import pytest
import rank_functions

import gradsync as gs
from gradsync.launching.launch import MainProcessError, WorkerError
from process_table import parent_of


def test_variables_of_ranks_are_there_and_no_secret():
    (variables,) = gs.launch(rank_functions.environment, (), 1)
    assert variables["GRADSYNC_ADDRESS"].startswith("127.0.0.1:")
    assert "OMP_NUM_THREADS" in variables
    assert not [name for name in variables if "SECRET" in name]


def test_failing_rank_ends_the_others_and_is_told():
    with pytest.raises(WorkerError) as caught:
        gs.launch(rank_functions.raise_on_rank_1, (), 2)
    error = caught.value
    assert (error.worker_id, error.exitcode) == (1, 1)
    first, second, *rest = str(error).splitlines()
    assert first == "worker[1] failed with exitcode=1"
    assert second.startswith("rank 1 (pid ")
    assert second.endswith(") failed with exit code 1")
    assert rest[:2] == ["", "Traceback (most recent call last):"]
    assert str(error).endswith("ValueError: boom")
    assert "gradsync/launching" not in str(error)
    assert isinstance(error, gs.GradsyncError)
    assert isinstance(error, multiprocessing.ProcessError)


def test_an_error_of_every_rank_names_every_rank():
    told = r"\nranks 0 and 1 failed with the same error; this is the error of rank [01] \(pid \d+ on .*\)\n\nTraceback"
    with pytest.raises(WorkerError, match=told):
        gs.launch(rank_functions.raise_on_every_rank, nprocs=2)
    with pytest.raises(gs.RankFailed, match=r"^ranks 0 and 1 failed with the same error"):
        gs.launcher(rank_functions.raise_on_every_rank, n_gpus=2)()


def test_killed_rank_is_named_by_signal():
    with pytest.raises(WorkerError, match=r"^worker\[1\] failed with exitcode=-9\n.* was killed by SIGKILL$") as caught:
        gs.launch(rank_functions.kill_rank_1, (), 2)
    assert caught.value.exitcode == -signal.SIGKILL


@pytest.mark.parametrize("name", ["RankFailed", "CollectiveTimeout"])
def test_consequence_never_hides_the_cause(name, tmp_path):
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(WorkerError, match="ZeroDivisionError: the cause") as caught:
        gs.launch(
            functools.partial(rank_functions.raise_consequence_then_cause, name, str(tmp_path / "fifo")), nprocs=2
        )
    assert caught.value.worker_id == 1


def test_error_is_told_although_a_thread_keeps_the_rank_alive():
    with pytest.raises(WorkerError, match="ValueError: with a thread"):
        gs.launch(rank_functions.leave_thread_running_after_error, (), 1)


def test_return_value_that_does_not_pickle_is_that_ranks_error():
    with pytest.raises(WorkerError, match=r"the return value of rank 1 needs to be picklable.*got lock") as caught:
        gs.launch(rank_functions.return_unpicklable_on_rank_1, (), 2)
    assert caught.value.worker_id == 1
    assert caught.value.results == {0: 0}


def test_a_result_that_does_not_pickle_ends_nobody_elses_work(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(WorkerError, match=r"the return value of rank 1 needs to be picklable") as caught:
        gs.launch(rank_functions.work_on_beside_an_unpicklable_result, str(tmp_path / "fifo"), 2)
    assert caught.value.results == {0: False}


def test_a_rank_that_failed_with_its_result_alone_is_not_awaited_to_join():
    began = time.monotonic()
    with pytest.raises(WorkerError, match="rank 1/2 ended with exit code 1 without joining"):
        gs.launch(rank_functions.join_beside_an_unpicklable_result, (), 2)
    assert time.monotonic() - began < 60  # a rank waits 120 s for those that may still come


def test_results_of_other_workers_are_kept():
    queue = multiprocessing.get_context("spawn").Queue()
    with pytest.raises(WorkerError, match="ValueError: boom") as caught:
        gs.launch(rank_functions.return_on_rank_0, queue, 2)
    assert caught.value.results == {0: "kept"}
    queue.close()
    queue.join_thread()


def test_what_does_not_pickle_is_refused_before_any_process_starts(monkeypatch):
    monkeypatch.setattr("gradsync.launching.supervisor.RankProcess", None)
    lock = threading.Lock()
    with pytest.raises(gs.InvalidArgument, match=r"<lambda> needs to be picklable.*define it at the top level"):
        gs.launch(lambda: lock, (), 2)
    with pytest.raises(gs.InvalidArgument, match=r"^args\[0\] of place needs to be picklable to reach the ranks: "):
        gs.launch(rank_functions.place, lock, 2)


def test_launch_inside_a_rank_is_refused_before_any_process_starts(monkeypatch):
    monkeypatch.setattr("gradsync.launching.supervisor.RankProcess", None)
    monkeypatch.setenv("GRADSYNC_RANK", "1")
    for call in (
        lambda: gs.launch(rank_functions.place, (), 2),
        lambda: gs.spawn(rank_functions.place, (), 2),
        lambda: rank_functions.rank_in_group(1),
    ):
        with pytest.raises(gs.InvalidArgument, match="starts its own ranks; run it with python, not with gradsync run"):
            call()


def test_launch_inside_a_launched_function_is_told_without_gradsync_run():
    for text in gs.launch(rank_functions.launch_again, (), 2):
        assert "a rank cannot launch other ranks" in text
        assert "gradsync run" not in text


def test_arguments_and_number_of_ranks_have_defaults(monkeypatch):
    monkeypatch.setattr("gradsync.launching.launch.default_process_count", lambda: 1)
    assert [arguments for _, arguments in gs.launch(rank_functions.place)] == [()]
    assert [arguments for _, arguments in gs.launch(rank_functions.place, (1, "a tuple"))] == [((1, "a tuple"),)]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((None, (), 2), "needs a function"),
        (
            (rank_functions.place, (5,), 2),
            r"to call place\(\*args\), write gs.launch\(functools.partial\(place, \*args\)\); to call ",
        ),
        (
            (rank_functions.start_method_and_rank, (5, 6), 2),
            r"launch passes args to start_.* as one argument, but args is a tuple of length 2, ",
        ),
        ((rank_functions.place, (), 0), "at least 1, got 0"),
        ((rank_functions.place, (), True), "at least 1, got True"),
        ((rank_functions.place, (), "2"), "at least 1, got '2'"),
    ],
)
def test_bad_arguments(arguments, text):
    with pytest.raises(gs.InvalidArgument, match=text):
        gs.launch(*arguments)


def test_nothing_is_left_behind():
    gs.launch(rank_functions.place, (), 1)  # what stays loaded stays open
    gc.collect()  # what other tests have left
    descriptors = os.listdir("/proc/self/fd")
    children = list_children()
    threads = set(threading.enumerate())
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    gs.launch(rank_functions.place, (), 2)
    with pytest.raises(WorkerError):
        gs.launch(rank_functions.exit_with, 1, 2)
    assert not command.opened_since(descriptors)
    assert set(threading.enumerate()) <= threads  # what an earlier test has left may end meanwhile
    assert handlers == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    assert list_children() == children


def list_children():
    """Gives the ids of this process's children, and reaps none."""
    children = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # a process that has ended meanwhile
            if parent_of(int(folder.name)) == os.getpid():
                children.add(int(folder.name))
    return children


def test_errors_pickle():
    worker = pickle.loads(pickle.dumps(WorkerError("worker[1] failed", exitcode=2, worker_id=1, results={0: 5})))
    assert (str(worker), worker.msg, worker.exitcode, worker.worker_id) == ("worker[1] failed",) * 2 + (2, 1)
    assert worker.results == {0: 5}
    main = pickle.loads(pickle.dumps(MainProcessError("received SIGTERM", signal_no=15)))
    assert (str(main), main.signal_no) == ("received SIGTERM", 15)


def run_python(script):
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


def test_function_of_a_script(tmp_path):
    script = command.write_script(
        tmp_path,
        """
        import os
        import gradsync as gs
        at_import = os.environ.get("OMP_NUM_THREADS"), os.environ.get("RANK")
        class Result:
            def __init__(self, value):
                self.value = value
        def work():
            return Result((at_import, __name__))
        if __name__ == "__main__":
            os.environ.pop("OMP_NUM_THREADS", None)
            for rank, result in enumerate(gs.launch(work, (), 2)):
                (threads, rank_at_import), name = result.value
                assert threads is not None and rank_at_import == str(rank), result.value
                assert type(result) is Result
            assert "RANK" not in os.environ
        """,
    )
    assert run_python(script) == (0, "", "")


def test_missing_main_guard_is_named(tmp_path):
    script = command.write_script(
        tmp_path,
        """
        import gradsync as gs
        def work():
            return 1
        gs.launch(work, (), 2)
        """,
    )
    code, _, err = run_python(script)
    assert code == 1
    assert 'put the launch under `if __name__ == "__main__":`' in err.splitlines()[-1]


@pytest.mark.parametrize("thing", ["def work(): return 1", "class work: pass"])
def test_what_is_defined_under_the_main_guard_is_told_where_to_go(tmp_path, thing):
    source = f"""
        import gradsync as gs
        if __name__ == "__main__":
            {thing}
            gs.launch(work, (), 2)
        """
    script = command.write_script(tmp_path, source)
    code, _, err = run_python(script)
    assert code == 1
    assert "define it above the `if __name__` line, at the top level of its module" in err.splitlines()[-1]
    assert "AttributeError" not in err


@pytest.mark.parametrize("arguments", [["-c"], ["-"]])
def test_functions_of_an_interactive_session(arguments):
    source = "import gradsync as gs\ndef work(offset): return 1 + offset\nprint(gs.launch(work, 2, 2))"
    options = {"input": source} if arguments == ["-"] else {}
    command = [sys.executable, *arguments, *([] if options else [source])]
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[3, 3]\n", "")
