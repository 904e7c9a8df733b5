import os
import re
import resource
import subprocess
import sys

import command
import pytest

from gradsync.launching.outcome import Outcome

RUN = ("run", "--no-prefix", "-n", 2)


def test_script_runs_as_main_of_each_rank(tmp_path):
    script = command.write_script(
        tmp_path,
        """
        import os, sys
        import __main__, neighbour
        assert __name__ == "__main__" and __main__.__file__ == __file__ == os.path.abspath(sys.argv[0])
        assert sys.path[0] == os.path.dirname(os.path.realpath(__file__))
        print(os.environ["RANK"], os.environ["LOCAL_WORLD_SIZE"], sys.argv[1:])
        """,
    )
    command.write_script(tmp_path, "", "neighbour.py")
    code, out, err = command.run(*RUN, script, "--lr", "1", "-n", "7", "--help")
    assert (code, err) == (0, "")
    expected = "2 ['--lr', '1', '-n', '7', '--help']"
    assert sorted(out.splitlines()) == [f"0 {expected}", f"1 {expected}"]


def test_module_runs_as_main_of_each_rank(tmp_path):
    (tmp_path / "package").mkdir()
    command.write_script(
        tmp_path,
        "import os, sys; print(os.environ['RANK'], __name__, __spec__.name, sys.argv[1:])",
        "package/job.py",
    )
    code, out, err = command.run(*RUN, "-m", "package.job", "--x", cwd=tmp_path)
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == [f"{r} __main__ package.job ['--x']" for r in range(2)]


def test_module_that_does_not_exist_is_told_before_ranks_start(tmp_path):
    code, out, err = command.run(*RUN, "-m", "no_such_package.job", cwd=tmp_path)
    assert (code, out) == (2, "")
    assert f"module 'no_such_package.job' does not exist (no 'no_such_package' in {tmp_path} or sys.path)" in err


def test_directory_with_main_runs(tmp_path):
    command.write_script(tmp_path, "print('here')", "__main__.py")
    assert command.run(*RUN, tmp_path)[:2] == (0, "here\nhere\n")


def test_a_rank_that_ends_well_without_joining_is_not_waited_for(tmp_path):
    """Nobody could tell that from its exit code; the others would wait until the time to meet is over."""
    script = command.write_script(
        tmp_path,
        """
        import os
        import gradsync as gs
        if os.environ["RANK"] == "0":
            with gs.init_process_group(timeout_seconds=60):
                pass
        """,
    )
    code, out, err = command.run(*RUN, script)
    assert (code, out) == (1, "")
    assert "RankFailed: rank 0/2: rank 1/2 ended with exit code 0 without joining" in err
    assert "failed with exit code 1, because of rank 1:" in err


@pytest.mark.parametrize(
    ("statement", "code", "text"),
    [
        ("sys.exit(3)", 3, "failed with exit code 3"),
        ("os._exit(4)", 4, "failed with exit code 4"),
        ("sys.exit('some text')", 1, "some text\ngradsync: rank 1 (pid"),
        ("os.kill(os.getpid(), 9)", 137, "was killed by SIGKILL"),
        ("raise KeyboardInterrupt", 130, "failed with exit code 130"),
    ],
)
def test_exit_code_of_the_failing_rank(tmp_path, statement, code, text):
    script = command.write_script(
        tmp_path,
        f"""
        import os, sys, signal
        if os.environ["RANK"] == "1":
            {statement}
        signal.pause()
        """,
    )
    result, out, err = command.run(*RUN, script)
    assert (result, out) == (code, "")
    assert text in err
    assert "rank 1 (pid" in err.splitlines()[-1]
    assert "Traceback" not in err


def test_traceback_of_the_failing_rank_is_last_and_without_our_frames(tmp_path):
    script = command.write_script(
        tmp_path,
        """
        import os, signal, sys
        def work():
            raise ValueError("boom")
        if os.environ["RANK"] == "1":
            print("before", file=sys.stderr)
            work()
        signal.pause()
        """,
    )
    code, _, err = command.run(*RUN, script)
    assert code == 1
    lines = err.splitlines()
    assert lines[:3] == ["before", "gradsync: the last output of rank 1:", "    before"]
    del lines[:2]
    assert lines[1].startswith("gradsync: rank 1 (pid ")
    assert lines[1].endswith(") failed with exit code 1:")
    assert lines[2] == "Traceback (most recent call last):"
    assert lines[-1] == "ValueError: boom"
    assert [line for line in lines if line.startswith("  File ")] == [
        f'  File "{script}", line 7, in <module>',
        f'  File "{script}", line 4, in work',
    ]


def test_syntax_error_shows_the_line_only(tmp_path):
    script = command.write_script(tmp_path, "def broken(:")
    code, _, err = command.run("run", "-n", 1, script)
    assert code == 1
    assert "gradsync/launching" not in err
    assert err.splitlines()[-1].startswith("SyntaxError")


def test_consequence_never_hides_the_cause(tmp_path):
    script = command.write_script(
        tmp_path,
        """
        import os, select, signal, sys
        from gradsync.errors import RankFailed
        if os.environ["RANK"] == "0":
            with open(sys.argv[1], "w") as fifo:  # waits until rank 1 is there
                fifo.write(str(os.getpid()))
            raise RankFailed("rank 1 is gone\\nmore", rank=1)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # however late it is on a busy machine
        with open(sys.argv[1]) as fifo:
            other = int(fifo.read())
        try:
            select.select([os.pidfd_open(other)], [], [])  # the cause is told after its consequence
        except ProcessLookupError:
            pass
        raise ZeroDivisionError("the cause")
        """,
    )
    os.mkfifo(tmp_path / "fifo")
    code, _, err = command.run(*RUN, script, tmp_path / "fifo")
    assert code == 1
    assert "gradsync: rank 0 also failed: gradsync.errors.RankFailed: rank 1 is gone\n" in err
    assert err.splitlines()[-1] == "ZeroDivisionError: the cause"


def test_consequence_never_hides_a_cause_that_comes_when_the_ranks_are_told_to_end(tmp_path):
    script = command.write_script(
        tmp_path,
        """
        import os, signal
        from gradsync.errors import RankFailed
        if os.environ["RANK"] == "0":
            error = RankFailed("rank 1 is gone", rank=1)
            if hasattr(error, "add_note"):  # the launcher's line shows the error, not its notes
                error.add_note("a note")
            raise error
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        signal.sigwait([signal.SIGTERM])
        raise ZeroDivisionError("the cause")
        """,
    )
    code, _, err = command.run(*RUN, script)
    assert code == 1
    assert "gradsync: rank 0 also failed: gradsync.errors.RankFailed: rank 1 is gone\n" in err
    assert err.splitlines()[-1] == "ZeroDivisionError: the cause"


def test_error_of_user_code_outside_with_reaches_the_other_ranks(tmp_path):
    for statement, told in (("raise ValueError('boom')", "ValueError: boom"), ("sys.exit(3)", "SystemExit: 3")):
        script = command.write_script(
            tmp_path,
            f"""
            import signal, sys
            import gradsync as gs
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # however late it is on a busy machine
            communicator = gs.init_process_group()
            if communicator.rank == 1:
                {statement}
            communicator.barrier()
            """,
        )
        _, _, err = command.run(*RUN, script)
        (line,) = [line for line in err.splitlines() if line.startswith("gradsync: rank 0 ")]
        assert "also failed: gradsync.errors.RankFailed:" in line
        assert line.endswith(told), err


def test_an_error_that_several_ranks_raised_is_told_once_with_all_of_them(tmp_path):
    script = command.write_script(
        tmp_path,
        """
        import signal
        import numpy as np
        import gradsync as gs
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # however late it is on a busy machine
        with gs.init_process_group() as comm:
            comm.all_reduce(np.ones(3 + comm.rank))
        """,
    )
    _, _, err = command.run(*RUN, script)
    assert "also failed" not in err
    first, second, *_ = err.splitlines()
    told = r"gradsync: ranks 0 and 1 failed with the same error; this is the error of rank [01] \(pid \d+ on .*\):"
    assert re.fullmatch(told, first)
    assert second == "Traceback (most recent call last):"
    assert err.count("the ranks disagree on the next collective") == 1


def test_rank_that_ended_normally_while_it_was_needed_is_named(tmp_path):
    script = command.write_script(
        tmp_path,
        """
        import signal
        import gradsync as gs
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # however late it is on a busy machine
        communicator = gs.init_process_group()
        if communicator.rank != 1:
            communicator.barrier()
        """,
    )
    code, _, err = command.run("run", "-n", 3, script)
    assert code == 1
    assert re.search(r"^gradsync: rank 1 \(pid \d+\) ended with exit code 0 before this failure$", err, re.MULTILINE), (
        err
    )


def test_variables_of_a_rank(tmp_path):
    script = command.write_script(
        tmp_path,
        """
        import os
        secret = [n for n in os.environ if "SECRET" in n]
        seen = os.environ["MASTER_PORT"] != os.environ["GRADSYNC_ADDRESS"].rpartition(":")[2]
        print(secret, seen, os.environ["OMP_NUM_THREADS"], os.environ["MKL_NUM_THREADS"],
              os.environ["GRADSYNC_BACKEND"], os.environ["GRADSYNC_HOSTED"])
        """,
    )
    outer = {"GRADSYNC_SECRET": "ab" * 32, "GRADSYNC_SECRET_FILE": "nowhere", "MKL_NUM_THREADS": "7"}
    environ = {k: v for k, v in os.environ.items() if not k.endswith("_NUM_THREADS")} | outer
    code, out, err = command.run("run", "-n", 1, "--backend", "local", script, env=environ)
    assert (code, err) == (0, "")
    assert out == f"[] True {len(os.sched_getaffinity(0))} 7 local 1\n"


def test_secret_is_hidden_from_environment_and_command_line(tmp_path):
    script = command.write_script(
        tmp_path,
        """
        import os
        from gradsync.environment import take_secret
        secret = take_secret()
        assert len(secret) == 32 and take_secret() == secret
        for pid in (os.getpid(), os.getppid()):
            for name in ("environ", "cmdline"):
                content = open(f"/proc/{pid}/{name}", "rb").read()
                assert secret not in content and secret.hex().encode() not in content
        assert secret.hex() not in "".join(os.environ.values())
        """,
    )
    assert command.run(*RUN, script) == (0, "", "")


def test_programs_that_a_rank_starts_inherit_no_descriptor(tmp_path):
    script = command.write_script(
        tmp_path,
        """
        import subprocess, sys
        code = "import os; print(sorted(os.listdir('/proc/self/fd'))[:-1])"
        subprocess.run([sys.executable, "-c", code], close_fds=False, check=True)
        """,
    )
    code, out, _ = command.run("run", "-n", 1, script)
    assert (code, out) == (0, "['0', '1', '2']\n")


def test_warning_options_of_the_interpreter_reach_the_ranks(tmp_path):
    script = command.write_script(tmp_path, "import sys; print(sys.warnoptions, sys.flags.optimize)")
    start = "import sys; sys.argv[0] = 'gradsync'; from gradsync.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-O", "-W", "error::UserWarning", "-c", start, "run", "-n", "1", script],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "error::UserWarning" in done.stdout
    assert done.stdout.endswith("1\n")


def test_custom_excepthook_still_runs(tmp_path):
    script = command.write_script(
        tmp_path,
        """
        import sys
        sys.excepthook = lambda kind, error, trace: print("reported", kind.__name__, flush=True)
        raise ValueError("boom")
        """,
    )
    code, out, err = command.run("run", "-n", 1, script)
    assert (code, out) == (1, "reported ValueError\n")
    assert err.endswith("ValueError: boom\n")


def test_fork_in_a_rank_reports_nothing_for_it(tmp_path):
    script = command.write_script(
        tmp_path,
        """
        import os
        child = os.fork()
        if child == 0:
            raise ValueError("in the child")
        assert os.waitpid(child, 0)[1] != 0
        """,
    )
    code, _, err = command.run("run", "-n", 1, script)
    assert code == 0
    assert "ValueError: in the child" in err


def test_no_open_files_left_is_one_line_that_says_what_to_do(tmp_path):
    script = command.write_script(tmp_path, "import time; time.sleep(60)")
    few = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))  # noqa: E731
    code, out, err = command.run("run", "-n", 6, script, preexec_fn=few)
    assert (code, out) == (1, "")
    killed, error = err.splitlines()
    assert re.fullmatch(r"gradsync: killing \d ranks", killed)  # nobody had asked them to end
    assert re.fullmatch(r"gradsync: error: rank \d cannot be started: Too many open files; .*ulimit -n.*", error)


def test_too_few_free_files_for_the_launcher_itself_are_refused_in_the_same_words(tmp_path):
    script = command.write_script(
        tmp_path,
        """
        import os, resource, sys
        import gradsync as gs

        resource.setrlimit(resource.RLIMIT_NOFILE, (60, 60))
        held = [os.open(os.devnull, os.O_RDONLY)]
        while held[-1] < 59:
            held.append(os.open(os.devnull, os.O_RDONLY))
        for free in range(1, 7):
            os.close(held.pop())
            if free >= 3:  # with fewer, not even the pipe for signals or the server's socket can be opened
                try:
                    gs.launch(len, "x", 1)
                except gs.BackendUnavailable as error:
                    print(error)
        """,
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    lines = done.stdout.splitlines()
    assert len(lines) == 4, done.stderr
    assert all(line.startswith("rank 0 cannot be started: Too many open files; ") for line in lines)


def test_what_ranks_find_that_nobody_has_set_is_told_once_on_request(tmp_path):
    env = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    script = command.write_script(tmp_path, "import os; print(os.environ['OPENBLAS_NUM_THREADS'])")
    env |= {"OMP_NUM_THREADS": "3", "GRADSYNC_LOG": "info"}
    code, out, err = command.run("run", "--no-prefix", "-n", 2, script, env=env)
    (told,) = [
        line for line in err.splitlines() if "variables that gradsync sets in the ranks, unless you set them: " in line
    ]
    assert code == 0
    assert out.split() == ["3", "3"]  # they follow the one that is set
    assert " OPENBLAS_NUM_THREADS=3 " in told
    assert "OMP_NUM_THREADS" not in told


@pytest.mark.parametrize(("options", "is_told"), [((), True), (("-n", 16), False)])
def test_a_large_number_of_ranks_that_nobody_has_named_is_told(tmp_path, monkeypatch, options, is_told):
    monkeypatch.setattr("gradsync.launching.run.default_process_count", lambda: 16)
    monkeypatch.setattr("gradsync.launching.run.supervise", lambda *_, **__: Outcome(()))
    code, _, err = command.refused("run", *options, command.write_script(tmp_path, ""))
    assert code == 0
    assert ("starting 16 ranks, one for each GPU or usable core; -n sets the number" in err) == is_told


def test_ranks_over_mpi_are_refused_with_what_to_type(tmp_path, monkeypatch):
    script = command.write_script(tmp_path, "")
    for options, env in ((("--backend", "mpi"), {}), ((), {"GRADSYNC_BACKEND": "mpi"})):
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        code, _, err = command.refused("run", *options, "-n", 3, script, "an argument")
        assert code == 2
        needed = "gradsync: error: --backend mpi needs MPI's own launcher; "
        assert err.startswith(f"{needed}run: mpiexec -n 3 python {script} 'an argument'")
