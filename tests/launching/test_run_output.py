"""What `gradsync run` does with the ranks' standard streams."""

import os
import signal

import command
import pytest


def test_each_line_names_its_rank(tmp_path):
    script = command.write_script(
        tmp_path, "import os, sys; print('out', os.environ['RANK']); print('err', file=sys.stderr)"
    )
    code, out, err = command.run("run", "-n", 2, script)
    assert code == 0
    assert sorted(out.splitlines()) == ["[rank 0] out 0", "[rank 1] out 1"]
    assert sorted(err.splitlines()) == ["[rank 0] err", "[rank 1] err"]


def test_one_rank_needs_no_name_but_can_have_one(tmp_path):
    script = command.write_script(tmp_path, "print('hello')")
    assert command.run("run", "-n", 1, script)[1] == "hello\n"
    assert command.run("run", "-n", 1, "--prefix", script)[1] == "[rank 0] hello\n"


def test_lines_come_as_they_are_printed(tmp_path):
    script = command.write_script(tmp_path, "import signal; print('early'); signal.pause()")
    with command.start("run", "-n", 1, script) as process:
        assert process.stdout.readline() == "early\n"
        process.terminate()
        process.communicate()


def test_log_dir_keeps_each_rank_apart(tmp_path):
    script = command.write_script(
        tmp_path, "import os, sys; print('out', os.environ['RANK']); print('err', file=sys.stderr)"
    )
    code, _, _ = command.run("run", "-n", 2, "--log-dir", tmp_path / "logs", script)
    assert code == 0
    for rank in range(2):
        text = (tmp_path / "logs" / f"rank-{rank}.log").read_text()
        assert sorted(text.splitlines()) == ["err", f"out {rank}"]


def test_log_dir_holds_the_last_run_only(tmp_path):
    script = command.write_script(tmp_path, "import sys; print('out'); sys.exit(int(sys.argv[1]))")
    logs = tmp_path / "logs"
    assert command.run("run", "-n", 2, "--log-dir", logs, "--max-restarts", 1, script, 3)[0] == 3
    of_two_starts = ["rank-0.log", "rank-0.restart-1.log", "rank-1.log", "rank-1.restart-1.log"]
    assert sorted(path.name for path in logs.iterdir()) == of_two_starts
    assert command.run("run", "-n", 1, "--log-dir", logs, script, 0)[0] == 0
    assert [path.name for path in logs.iterdir()] == ["rank-0.log"]
    assert (logs / "rank-0.log").read_text() == "out\n"


def test_last_output_of_the_failing_rank_is_repeated_before_the_cause(tmp_path):
    source = """
        import os, signal
        if os.environ["RANK"] == "1":
            for step in range(100):
                print("step", step)
            os.kill(os.getpid(), 11)
        signal.pause()
        """
    code, _, err = command.run("run", "-n", 2, command.write_script(tmp_path, source))
    assert code == 128 + signal.SIGSEGV
    lines = err.splitlines()
    assert lines[0] == "gradsync: the last output of rank 1:"
    assert lines[-2] == "    step 99"
    assert f"on {os.uname().nodename}) was killed by SIGSEGV; " in lines[-1]


def test_last_output_is_that_of_the_rank_for_which_the_others_waited(tmp_path):
    source = """
        import time
        import gradsync as gs
        with gs.init_process_group(collective_timeout_seconds=1.0) as comm:
            print("rank", comm.rank, "waits" if comm.rank == 0 else "sleeps")
            if comm.rank == 1:
                time.sleep(60)
            comm.barrier()
        """
    code, _, err = command.run("run", "-n", 2, command.write_script(tmp_path, source))
    assert code == 1
    assert err.splitlines()[:2] == ["gradsync: the last output of rank 1:", "    rank 1 sleeps"]
    assert "failed with exit code 1, because of rank 1:" in err


@pytest.mark.parametrize(("options", "reader"), [((), 0), (("--stdin", "1"), 1), (("--stdin", "none"), None)])
def test_one_rank_reads_standard_input(tmp_path, options, reader):
    script = command.write_script(tmp_path, "import os, sys; print(os.environ['RANK'], repr(sys.stdin.read()))")
    _, out, _ = command.run("run", "--no-prefix", "-n", 2, *options, script, typed="typed")
    assert sorted(out.splitlines()) == [f"{rank} {'typed' if rank == reader else ''!r}" for rank in range(2)]


def test_breakpoint_works_in_the_chosen_rank(tmp_path):
    source = """
        import os
        name = "rank " + os.environ["RANK"]
        if name == "rank 1":
            breakpoint()
        print("after", name)
        """
    script = command.write_script(tmp_path, source)
    code, out, err = command.run("run", "-n", 2, "--stdin", 1, script, typed="p name.upper()\ncontinue\n")
    assert code == 0, err
    assert "'RANK 1'" in out
    assert "[rank 1] after rank 1" in out.replace("(Pdb) ", "")


@pytest.mark.parametrize("rank", ["2", "-1", "x", ""])
def test_a_rank_that_is_not_there_cannot_read(tmp_path, rank):
    script = command.write_script(tmp_path, "")
    code, _, err = command.refused("run", "-n", 2, f"--stdin={rank}", script)
    assert code == 2
    assert f"--stdin needs a rank from 0 to 1, or 'none', got {rank!r}" in err


def test_the_reader_of_the_output_may_leave(tmp_path):
    script = command.write_script(tmp_path, "for n in range(10**9): print(n)")
    with command.start("run", "-n", 2, script) as process:
        process.stdout.readline()
        process.stdout.close()
        code = process.wait(60)
        err = process.stderr.read()
    assert code == 1
    assert err.startswith("gradsync: standard output cannot be written: its reader has gone\n")
    assert "BrokenPipeError" in err
    assert "Exception in thread" not in err
