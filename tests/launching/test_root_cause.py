"""Which rank a report blames, and what it shows: the cause last, and never a consequence instead."""

import os
import re
import signal
import sys
import time

import numpy as np
import pytest

import gradsync as gs

RUN = ("run", "--no-prefix", "-n", 2)
PACKAGE = os.path.dirname(gs.__file__)


def frames(err):
    return [line.strip() for line in err.splitlines() if line.startswith("  File ")]


def blamed(err):
    """The rank that the report's last line about a rank names."""
    return re.findall(r"^gradsync: rank (\d+) \(pid \d+ on \S+\) (?:failed|was killed)", err, re.MULTILINE)[-1]


# -- What a report shows -----------------------------------------------------------------------------------------------


def test_the_report_ends_with_the_users_traceback_below_the_ranks_last_output(cli, script):
    path = script(
        """
        import os, signal, sys
        def work():
            raise ValueError("boom")
        if os.environ["RANK"] == "1":
            os.write(1, b"".join(b"step %d\\n" % step for step in range(100)))
            os.write(1, b" 10%\\r 20%\\rcaf\\xff \\r\\n")
            os.write(1, b"no end")
            work()
        signal.pause()
        """
    )
    code, _, err = cli("run", "-n", 2, path)
    assert code == 1
    lines = err.splitlines()
    assert lines[0] == "gradsync: the last output of rank 1:"
    begun = next(number for number, line in enumerate(lines) if line.startswith("gradsync: rank 1 (pid "))
    assert lines[begun - 3 : begun] == ["    step 99", "    caf\N{REPLACEMENT CHARACTER} ", "    no end"]
    assert lines[begun].endswith(") failed with exit code 1:")
    assert lines[begun + 1] == "Traceback (most recent call last):"
    assert lines[-1] == "ValueError: boom"
    assert frames(err) == [f'File "{path}", line 9, in <module>', f'File "{path}", line 4, in work']


def test_of_an_endless_last_line_little_is_shown(cli, script):
    """What is kept begins with a whole character."""
    path = script('import os\nos.write(1, "x\\N{EURO SIGN}".encode() * 100_000)\nraise SystemExit(3)')
    code, _, err = cli(*RUN, path, stdout=-3)
    assert code == 3
    assert set(err.splitlines()[1].strip()) <= {"x", "\N{EURO SIGN}"}
    assert len(err) < 100_000


def test_a_crash_in_native_code_says_how_to_see_where(cli, script):
    done = cli("run", "-n", 1, script("import os; os.kill(os.getpid(), 11)"))
    assert done.code == 128 + signal.SIGSEGV
    assert "PYTHONFAULTHANDLER=1" in done.err


# Where a traceback ends: in the user's own lines; in gradsync's only where they may be at fault.
TRACEBACKS = {
    "def broken(:": ("SyntaxError", 0),
    """
    import numpy as np
    import gradsync as gs
    with gs.init_process_group():
        sync = gs.AllreduceCallback("mean")
        with sync.backward():
            sync("weights", np.ones(3))
            sync("weights", "no array")
    """: ("", 0),
    """
    import gradsync as gs
    class Broken(dict):
        def __len__(self):
            return 1 / 0
    gs.get_offsets.__globals__.clear()  # as a fault of gradsync's own would be
    gs.get_offsets([(2, 3)])
    """: ("NameError", 1),
}


@pytest.mark.parametrize("source", TRACEBACKS)
def test_a_traceback_shows_the_users_lines_and_gradsyncs_only_where_they_matter(source, cli, script):
    path = script(source)
    code, _, err = cli("run", "-n", 1, path)
    last, is_ours_shown = TRACEBACKS[source]
    assert code == 1
    assert last in err.splitlines()[-1]
    assert str(path) in frames(err)[0]
    assert any(PACKAGE in frame for frame in frames(err)) == is_ours_shown


def test_an_error_that_several_ranks_raised_is_told_once_with_all_of_them(cli, script):
    path = script(
        """
        import signal
        import numpy as np
        import gradsync as gs
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # however late it is on a busy machine
        with gs.init_process_group() as comm:
            comm.all_reduce(np.ones(3 + comm.rank))
        """
    )
    err = cli(*RUN, path).err
    assert "also failed" not in err
    assert err.startswith("gradsync: ranks 0 and 1 failed with the same error")
    assert err.count("Traceback") == 1


def test_what_a_child_of_a_rank_raises_is_no_failure_of_the_rank(cli, script):
    path = script(
        """
        import os
        child = os.fork()
        if child == 0:
            raise ValueError("in the child")
        assert os.waitpid(child, 0)[1] != 0
        """
    )
    code, _, err = cli("run", "-n", 1, path)
    assert code == 0
    assert "ValueError: in the child" in err


@pytest.mark.parametrize("name", ["json", "resource", "traceback", "linecache", "token", "ast"])
def test_a_module_of_the_users_with_a_name_of_pythons_does_not_break_the_report(name, cli, script):
    script("LIMIT = 3", f"{name}.py")
    done = cli("run", "-n", 1, script(f"import {name}\nraise ValueError({name}.LIMIT)"))
    assert done.err.splitlines()[-1] == "ValueError: 3"


# -- sys.excepthook ----------------------------------------------------------------------------------------------------


def test_a_crash_reporter_runs_and_the_error_is_told(cli, script):
    path = script(
        """
        import sys
        sys.excepthook = lambda kind, error, trace: print("reported", kind.__name__, flush=True)
        raise ValueError("boom")
        """
    )
    code, out, err = cli("run", "-n", 1, path)
    assert (code, out) == (1, "reported ValueError\n")
    assert err.endswith("ValueError: boom\n")


HOOKED = """
    import os, sys
    import gradsync as gs
    def hook(*_):
        {hook}
    sys.excepthook = hook
    with gs.init_process_group("shm") as comm:
        comm.barrier()
        if comm.rank == 1:
            raise ValueError("the cause")
        comm.barrier()
"""


@pytest.mark.parametrize("hook", ["raise RuntimeError('no network')", "os._exit(1)", "sys.exit(3)"])
def test_a_crash_reporter_that_fails_or_ends_the_process_hides_nothing(hook, cli, script):
    """To end the process is a usual recipe under MPI."""
    code, _, err = cli(*RUN, script(HOOKED.format(hook=hook)))
    assert code != 0
    assert err.splitlines()[-1] == "ValueError: the cause"
    assert blamed(err) == "1"


def test_the_other_ranks_hear_of_an_error_before_a_slow_crash_reporter(cli, script, tmp_path):
    """The hook of rank 1 goes on when rank 0 has heard."""
    path = script(
        """
        import os, sys, time
        import gradsync as gs
        def hook(*_):
            for _ in range(300 * int(os.environ["RANK"])):
                if os.path.exists(sys.argv[1]):
                    print("first heard, then reported", flush=True)
                    break
                time.sleep(0.01)
        sys.excepthook = hook
        comm = gs.init_process_group("shm")
        if comm.rank == 1:
            raise ValueError("the cause")
        try:
            comm.barrier()
        except gs.RankFailed:
            open(sys.argv[1], "w").close()
            raise
        """
    )
    done = cli(*RUN, path, tmp_path / "heard")
    assert "first heard, then reported" in done.out
    assert done.err.splitlines()[-1] == "ValueError: the cause"


# -- Causes and consequences -------------------------------------------------------------------------------------------


def test_a_consequence_that_comes_first_never_hides_the_cause(cli, script, tmp_path):
    path = script(
        """
        import os, signal, sys
        import gradsync as gs
        if os.environ["RANK"] == "0":
            with open(sys.argv[1], "w") as fifo:  # waits until rank 1 is there
                fifo.write(str(os.getpid()))
            raise gs.RankFailed("rank 1 is gone", rank=1)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # however late it is on a busy machine
        with open(sys.argv[1]) as fifo:
            other = int(fifo.read())
        while os.path.exists(f"/proc/{other}"):
            signal.sigtimedwait([], 0.01)
        raise ZeroDivisionError("the cause")
        """
    )
    os.mkfifo(tmp_path / "fifo")
    code, _, err = cli(*RUN, path, tmp_path / "fifo")
    assert code == 1
    assert "gradsync: rank 0 also failed: gradsync.errors.RankFailed: rank 1 is gone\n" in err
    assert (blamed(err), err.splitlines()[-1]) == ("1", "ZeroDivisionError: the cause")


def test_a_cause_that_a_rank_tells_only_when_it_is_asked_to_end_is_the_cause(cli, script):
    path = script(
        """
        import os, signal
        import gradsync as gs
        if os.environ["RANK"] == "0":
            error = gs.RankFailed("rank 1 is gone", rank=1)
            error.add_note("a note")  # the launcher's line shows the error, not its notes
            raise error
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        signal.sigwait([signal.SIGTERM])
        raise ZeroDivisionError("the cause")
        """
    )
    err = cli(*RUN, path).err
    assert "gradsync: rank 0 also failed: gradsync.errors.RankFailed: rank 1 is gone\n" in err
    assert err.splitlines()[-1] == "ZeroDivisionError: the cause"


def test_an_exit_outside_of_with_reaches_the_other_ranks(cli, script):
    path = script(
        """
        import signal, sys
        import gradsync as gs
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # however late it is on a busy machine
        comm = gs.init_process_group()
        if comm.rank == 1:
            sys.exit(3)
        comm.barrier()
        """
    )
    err = cli(*RUN, path).err
    [line] = [line for line in err.splitlines() if line.startswith("gradsync: rank 0 ")]
    assert "also failed: gradsync.errors.RankFailed:" in line
    assert line.endswith("SystemExit: 3"), err


def test_a_rank_that_ended_well_while_it_was_needed_is_named(cli, script):
    path = script(
        """
        import signal
        import gradsync as gs
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # however late it is on a busy machine
        comm = gs.init_process_group()
        if comm.rank != 1:
            comm.barrier()
        """
    )
    code, _, err = cli("run", "-n", 2, path)
    assert code == 1
    assert re.search(r"^gradsync: rank 1 \(pid \d+\) ended with exit code 0 before this failure$", err, re.MULTILINE)


def test_a_rank_that_ends_without_joining_is_not_awaited_and_is_named(cli, script):
    """The others would wait for it until the deadline."""
    path = script(
        """
        import os
        import gradsync as gs
        if os.environ["RANK"] == "0":
            gs.init_process_group("shm", timeout_seconds=600)
        """
    )
    code, out, err = cli(*RUN, path)
    assert (code, out) == (1, "")
    assert "RankFailed: rank 0/2: rank 1/2 ended with exit code 0 without joining" in err
    assert "because of rank 1:" in err


def test_the_last_output_is_that_of_the_rank_for_which_the_others_waited(cli, script):
    path = script(
        """
        import time
        import gradsync as gs
        with gs.init_process_group(collective_timeout_seconds=1.0) as comm:
            print("rank", comm.rank, "waits" if comm.rank == 0 else "sleeps")
            if comm.rank == 1:
                time.sleep(60)
            comm.barrier()
        """
    )
    code, _, err = cli("run", "-n", 2, path)
    assert code == 1
    assert err.splitlines()[:2] == ["gradsync: the last output of rank 1:", "    rank 1 sleeps"]
    assert "because of rank 1:" in err


def test_a_rank_that_was_stopped_before_it_joined_is_named(cli, script):
    path = script(
        """
        import os, signal
        import gradsync as gs
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGSTOP)
        gs.init_process_group(timeout_seconds=1)
        """
    )
    code, _, err = cli(*RUN, path)
    assert code == 1
    assert "was paused by a signal" in err


@pytest.mark.ranks(3, fresh=True)
def test_a_third_rank_hears_of_the_culprit_and_not_of_the_messenger(comm):
    comm.barrier()
    with pytest.raises(gs.RankFailed) as caught:
        if comm.rank == 1:  # which has heard of rank 0's failure before anybody else
            with comm:
                raise gs.RankFailed("rank 0 aborted: no such batch", rank=0)
        while True:
            comm.all_reduce(np.ones(1))
    assert caught.value.rank == 0


@pytest.mark.slow  # nothing is to be said before some seconds
def test_a_thread_that_keeps_a_finished_rank_alive_is_told(cli, script):
    path = script(
        """
        import sys, threading
        import gradsync as gs
        with gs.init_process_group() as comm:
            comm.barrier()
            if comm.rank == 1:
                threading.Thread(target=sys.stdin.read, name="uploader").start()
        """
    )
    process = cli.start(*RUN, "--stdin", 1, path, stdin=-1)
    time.sleep(8.0)
    assert "uploader" in process.result().err


def test_a_part_of_the_world_given_as_arguments_needs_an_address_of_its_own(cli, script):
    """Not: stop whoever holds the port, which is the launcher."""
    path = script(
        """
        import os, sys
        import gradsync as gs
        rank = int(os.environ["RANK"])
        try:
            gs.init_process_group("shm", rank=rank % 2, world_size=2, timeout_seconds=5)
        except gs.InvalidArgument as error:
            os.write(1, b"told\\n" if "a part" in str(error) else b"")
        address = f"127.0.0.1:{sys.argv[1 + rank // 2]}"
        with gs.init_process_group("shm", rank=rank % 2, world_size=2, address=address) as comm:
            os.write(1, f"met {comm.objects.all_gather(rank)}\\n".encode())
        """
    )
    done = cli("run", "--no-prefix", "-n", 4, path, gs.free_port(), gs.free_port())
    assert sorted(done.out.splitlines()) == ["met [0, 1]"] * 2 + ["met [2, 3]"] * 2 + ["told"] * 4, done.err


def test_a_stand_in_for_mpi4py_does_no_harm(cli, script):
    """Test suites put an empty module where it would be."""
    path = script(
        """
        import sys, types
        sys.modules["mpi4py"] = mpi4py = types.ModuleType("mpi4py")
        sys.modules["mpi4py.MPI"] = mpi4py.MPI = types.ModuleType("mpi4py.MPI")
        import gradsync as gs
        print(gs.init_process_group("local").world_size)
        """
    )
    assert cli.program(sys.executable, path) == (0, "1\n", "")
