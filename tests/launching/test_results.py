"""What functions return on ranks: it comes as pickle brings it, however large, and leaves nothing open."""

import os
import pickle
import resource
import signal

import numpy as np
import pytest

import gradsync as gs


def large_and_small():
    """Of every layout, and two that share memory by being one."""
    values = np.arange(200_000.0).reshape(400, 500)
    fixed = values * 2
    fixed.flags.writeable = False
    return {
        "C": values,
        "Fortran": np.asfortranarray(values),
        "small and Fortran": np.asfortranarray(values[:40]),
        "strided": values[::2, ::3],
        "read-only": fixed,
        "small": values[0, :7].copy(),
        "again": values,
        "bytes": bytes(range(256)) * 100_000,
        "nested": [[float(i) for i in range(500)] for _ in range(200)],
    }


def test_large_values_come_as_pickle_brings_them():
    context = gs.spawn(large_and_small, nprocs=2, join=False)
    wanted = large_and_small()
    for results in context.return_queues:
        got = results.get()
        assert got.keys() == wanted.keys()
        for name, value in wanted.items():
            if isinstance(value, np.ndarray):
                plain = pickle.loads(pickle.dumps(value, pickle.HIGHEST_PROTOCOL))
                assert str(got[name].flags) == str(plain.flags), name
                np.testing.assert_array_equal(got[name], value)
            else:
                assert got[name] == value, name
        assert got["again"] is got["C"]
        got["C"][:] = -1.0
        assert (got["Fortran"] == wanted["Fortran"]).all()
    context.join()


def test_what_pickles_by_value_only_comes_with_its_arrays():
    [(before, function, behind)] = gs.launch(lambda: (np.arange(1e5), lambda: 5, np.arange(1e5) * 2), (), 1)
    assert (before * 2 == behind).all()
    assert function() == 5


def limited(hard):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, hard))
    return np.arange(500_000.0)


def test_a_limit_of_files_is_lifted_if_it_may_be_and_told_if_not():
    """Schedulers set one."""
    [got] = gs.launch(limited, -1, 1)
    assert (got == np.arange(500_000.0)).all()
    with pytest.raises(gs.WorkerError, match="File too large"):
        gs.launch(limited, 2**20, 1)


class Stubborn(Exception):
    """Pickles, and cannot be rebuilt."""

    def __init__(self, first, second):
        super().__init__(first)


def test_a_value_that_does_not_unpickle_here_is_an_error_that_names_its_rank():
    context = gs.spawn(lambda: Stubborn(1, 2), (), 1)
    with pytest.raises(gs.InvalidArgument, match="rank 0"):
        context.return_queues[0].get()


def test_an_exception_that_does_not_unpickle_is_told_as_text():
    def work():
        raise Stubborn(1, 2)

    with pytest.raises(gs.RankFailed, match="Stubborn: 1"):
        gs.launcher(work, n_gpus=1)()


@pytest.mark.parametrize("then_fails", [False, True])
def test_a_value_that_does_not_pickle_is_that_ranks_error_and_ends_nobody_elses_work(then_fails, tmp_path):
    """And what another rank raises later is worse: the run has failed of that."""

    def work(path):
        import threading

        if os.environ["RANK"] == "1":
            with open(path, "w") as fifo:
                fifo.write(str(os.getpid()))
            return threading.Lock()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        with open(path) as fifo:
            other = int(fifo.read())
        while os.path.exists(f"/proc/{other}"):
            signal.sigtimedwait([], 0.01)
        if then_fails:
            raise ValueError("of rank 0")
        return "not asked to end" if signal.sigtimedwait({signal.SIGTERM}, 0.5) is None else "asked to end"

    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(gs.WorkerError, match="of rank 0" if then_fails else "return value of rank 1") as caught:
        gs.launch(work, str(tmp_path / "fifo"), 2)
    assert caught.value.worker_id == (0 if then_fails else 1)
    assert caught.value.results == ({} if then_fails else {0: "not asked to end"})


def test_a_rank_whose_value_does_not_pickle_is_not_awaited_by_ranks_that_join():
    def work():
        import threading

        if os.environ["RANK"] == "0":
            gs.init_process_group("shm", timeout_seconds=600)
        return threading.Lock()

    with pytest.raises(gs.WorkerError, match="rank 1/2 ended with exit code 1 without joining"):
        gs.launch(work, (), 2)


class KillsOnPickling:
    """Ends its process when it is pickled, between the arrays before and behind it."""

    def __reduce__(self):
        os.kill(os.getpid(), signal.SIGKILL)


def test_values_leave_no_descriptor_open_whatever_becomes_of_the_ranks():
    def work(length):
        return bytes(length)

    def die():
        if os.environ["RANK"] == "1":
            return [np.ones(500_000), KillsOnPickling(), np.ones(500_000)]
        return np.full(500_000, 3.0)

    counts = []
    for length in (0, 1 << 20):  # what is loaded once stays open
        assert gs.launch(work, length, 1) == [bytes(length)]
        with pytest.raises(gs.WorkerError) as caught:
            gs.launch(die, (), 2)
        assert (caught.value.exitcode, caught.value.worker_id) == (-9, 1)
        assert all((value == 3.0).all() for value in caught.value.results.values())
        del caught
        counts.append(len(os.listdir("/proc/self/fd")))
    assert counts[1] <= counts[0]  # something else of the process may have closed one meanwhile


# -- The interpreter of the ranks, and its end -------------------------------------------------------------------------


EMBEDDED = """
    import multiprocessing, sys
    import gradsync as gs
    def work():
        return "done"
    if __name__ == "__main__":
        {}
        print(gs.launch(work, (), 1))
"""


@pytest.mark.parametrize("own", ["'/bin/echo'", "''", "None"])
def test_ranks_run_the_python_that_an_application_has_named(own, cli, script):
    """As multiprocessing does: sys.executable of an application with a Python inside is the application."""
    path = script(EMBEDDED.format(f"multiprocessing.set_executable(sys.executable); sys.executable = {own}"))
    assert cli.python(path) == (0, "['done']\n", "")


@pytest.mark.parametrize(
    ("own", "told"),
    [
        ("'/bin/true'", "/bin/true ended with exit code 0 before the rank began"),
        ("'/bin/false'", "/bin/false ended with exit code 1 before the rank began"),
        ("''", "multiprocessing.set_executable"),
        ("'/nowhere'", "names none, but '/nowhere'"),
    ],
)
def test_what_is_no_python_is_told(own, told, cli, script):
    code, out, err = cli.python(script(EMBEDDED.format(f"sys.executable = {own}")))
    assert (code, out) == (1, "")
    assert told in err


@pytest.mark.slow  # of 5 s
@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("threading.Thread(target=wait, name='uploader').start()", "the thread 'uploader' has not"),
        ("atexit.register(wait)", "something that runs at its exit has not ended"),
    ],
)
def test_what_keeps_a_rank_alive_after_its_program_is_told(what, told, cli, script):
    path = script(
        f"""
        import atexit, threading, time
        def wait():
            time.sleep(6.0)
        {what}
        """
    )
    code, _, err = cli("run", "--no-prefix", "-n", 1, path)
    assert code == 0
    assert err.startswith("gradsync: rank 0: the program has ended, but " + told)
    assert err.endswith(f"({path}:4 in wait)\n")
