"""gradsync run: what a rank finds, options, exit codes, restarts, standard input, refusals."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys

import pytest

from commands import refusals

RUN = ("run", "--no-prefix", "-n", 2)


def test_a_rank_is_the_script_as_python_runs_it_with_torchruns_variables(cli, script, tmp_path):
    """One run for all that a rank can see of itself: many small promises."""
    path = script(
        """
        import __main__, json, os, subprocess, sys
        import neighbour
        from gradsync.environment import read_secret  # nothing public gives the secret, and it must not be found
        secret = read_secret()
        shown = b"".join(
            open(f"/proc/{pid}/{name}", "rb").read()
            for pid in (os.getpid(), os.getppid()) for name in ("environ", "cmdline")
        )
        code = "import os; print(sorted(os.listdir('/proc/self/fd'))[:-1])"
        inherited = subprocess.run([sys.executable, "-c", code], close_fds=False, stdout=subprocess.PIPE, text=True)
        found = {
            "argv": sys.argv[1:],
            "main": [__name__, __main__.__file__, sys.argv[0], sys.path[0]],
            "warnings": "error::UserWarning" in sys.warnoptions and sys.flags.optimize,
            "variables": dict(os.environ),
            "secret": [len(secret), secret == read_secret(), secret in shown, secret.hex().encode() in shown],
            "inherited": inherited.stdout,
            "family": [os.getpid() == os.getpgid(0) == os.getsid(0)],
        }
        with open(sys.argv[1] + os.environ["RANK"], "w") as file:
            json.dump(found, file)
        """
    )
    script("", "neighbour.py")
    variables = {name: None for name in os.environ if name.endswith("_NUM_THREADS")}
    variables |= {
        "GRADSYNC_SECRET": "ab" * 32,
        "GRADSYNC_SECRET_FILE": "nowhere",
        "PMI_FD": "9",
        "PMIX_RANK": "0",
        "HYDI_CONTROL_FD": "7",
    }
    variables |= {"OMP_NUM_THREADS": "3", "MKL_NUM_THREADS": "7", "GRADSYNC_LOG": "info"}
    rest = ("--lr", "1", "-n", "7", "--help")
    python = ("-O", "-W", "error::UserWarning", "-m", "gradsync")
    done = cli.python(*python, *RUN, "--backend", "shm", path, tmp_path / "found", *rest, environment=variables)
    assert (done.code, done.out) == (0, "")
    ranks = [json.loads((tmp_path / f"found{rank}").read_text()) for rank in range(2)]
    for rank, found in enumerate(ranks):
        assert found["argv"] == [str(tmp_path / "found"), *rest]
        assert found["main"] == ["__main__", str(path), str(path), str(tmp_path)]
        assert found["warnings"] == 1
        assert found["secret"] == [32, True, False, False]
        secret_file = found["variables"]["GRADSYNC_SECRET_FILE"].removeprefix("fd:")
        assert found["inherited"] == f"{sorted(['0', '1', '2', secret_file])}\n"
        assert found["family"] == [True]
        own = found["variables"]
        wanted = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": 0}
        wanted |= {"GROUP_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "GRADSYNC_BACKEND": "shm"}
        wanted |= {"TORCHELASTIC_RESTART_COUNT": 0, "OMP_NUM_THREADS": 3, "OPENBLAS_NUM_THREADS": 3}
        wanted |= {"MKL_NUM_THREADS": 7}
        assert {name: own.get(name) for name in wanted} == {name: str(value) for name, value in wanted.items()}
        assert own["MASTER_PORT"] != own["GRADSYNC_ADDRESS"].rpartition(":")[2]  # the user's, for a server of his own
        assert not [name for name in own if name == "GRADSYNC_SECRET" or name.startswith(("PMI", "HYDI"))]
    [line] = [line for line in done.err.splitlines() if "OPENBLAS_NUM_THREADS=3" in line]
    assert "OMP_NUM_THREADS=" not in line.replace("_OMP", "")  # only what nobody has set


def test_a_module_and_a_folder_run_as_python_runs_them(cli, script, tmp_path):
    (tmp_path / "package").mkdir()
    script("import os, sys; os.write(1, f'{__name__} {__spec__.name} {sys.argv[1:]}\\n'.encode())", "package/job.py")
    script("print('here')", "__main__.py")
    assert cli(*RUN, "-m", "package.job", "--x", cwd=tmp_path).told == (0, "__main__ package.job ['--x']\n" * 2, "")
    assert cli(*RUN, tmp_path).told == (0, "here\n" * 2, "")


@pytest.mark.parametrize("kind", ["zipapp", "pyc"])
def test_whatever_python_runs_runs(kind, cli, script, tmp_path):
    source = script("import os, sys; os.write(1, f'{__name__} {sys.argv[1:]}\\n'.encode())")  # in one piece
    if kind == "zipapp":
        (tmp_path / "app").mkdir()
        shutil.copy(source, tmp_path / "app" / "__main__.py")
        cli.python("-m", "zipapp", tmp_path / "app", "-o", tmp_path / "app.pyz", "-p", "/usr/bin/env python3")
        path = tmp_path / "app.pyz"
    else:
        path = tmp_path / "s.pyc"
        cli.python("-c", f"import py_compile; py_compile.compile({str(source)!r}, {str(path)!r})")
    assert cli(*RUN, path, "--x").told == (0, "__main__ ['--x']\n" * 2, "")


def test_a_program_that_only_one_rank_could_read_is_refused(cli, script):
    """A pipe, which python reads once."""
    line = f"{sys.executable} -m gradsync run -n 2 <(cat {script('print(1)')})"
    done = cli.program("bash", "-c", line)
    assert (done.code, done.out) == (2, "")
    assert "save it to a file first" in done.err


JOINS = """
    import os, gradsync as gs
    with gs.init_process_group() as comm:
        os.write(1, b"%d\\n" % comm.world_size)  # in one piece: both ranks write
"""


@pytest.mark.parametrize("way", ["becomes python", "starts python"])
def test_ranks_behind_a_wrapper_join(way, cli, script):
    """numactl becomes the rank's Python, and nsys starts it and goes on when it has ended."""
    text = 'exec nice -n 1 "$@"' if way == "becomes python" else '"$@"; sleep 0.1; echo over'
    wrapper = script(f"#!/bin/sh\necho $1\nshift\n{text}\n", "wrapper.sh")
    wrapper.chmod(0o755)
    done = cli(*RUN, "--wrap", f"{wrapper} 'an option'", script(JOINS))
    wanted = ["an option", "2"] if way == "becomes python" else ["an option", "2", "over"]
    assert (done.code, sorted(done.out.splitlines())) == (0, sorted(wanted * 2)), done.err


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_the_launcher_of_a_rank_behind_a_wrapper(number, cli, script):
    wrapper = script('#!/bin/sh\n"$@"\n:\n', "wrapper.sh")
    wrapper.chmod(0o755)
    path = script("import os, signal\nos.write(1, b'ready\\n')\nsignal.pause()")
    launcher = cli.start(*RUN, "--wrap", wrapper, path)
    assert [launcher.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
    launcher.send_signal(number)
    assert launcher.result().code == (-9 if number == signal.SIGKILL else 128 + number)


def test_the_exit_code_of_a_rank_behind_a_wrapper_is_its_own(cli, script):
    wrapper = script('#!/bin/sh\n"$@"\nexit 0\n', "wrapper.sh")
    wrapper.chmod(0o755)
    assert cli("run", "-n", 1, "--wrap", wrapper, script("raise SystemExit(3)")).code == 3


@pytest.mark.parametrize("wrap", ["true", "false", "sh -c 'kill -9 $$'"])
def test_a_wrapper_that_does_not_start_python_is_told(wrap, cli, script):
    done = cli("run", "-n", 1, "--wrap", wrap, script("print('here')"))
    assert (done.code, done.out) == (137 if "kill" in wrap else 1, "")
    assert "before the rank began" in done.err
    assert wrap.partition(" ")[0] in done.err.splitlines()[-1]


def test_a_rank_that_becomes_another_program_joins(cli, script):
    """To start again under LD_PRELOAD, for example."""
    joins = script(JOINS)
    again = script(f"import os, sys; os.execvp('nice', ['nice', sys.executable, {str(joins)!r}])", "again.py")
    assert cli(*RUN, again) == (0, "2\n" * 2, "")


def test_a_program_that_a_rank_starts_is_no_rank(cli, script):
    path = script(f"import subprocess, sys\nprint(subprocess.run([sys.executable, {str(script(JOINS, 'join.py'))!r}]))")
    done = cli("run", "-n", 2, path)
    assert done.code == 0
    assert done.err.count("this process is no rank") == 2


REFUSED = {
    "'numactl": ("-n", 1, "--wrap", "'numactl", "script.py"),  # no closing quotation
    "'no such program'": ("-n", 1, "--wrap", "'no such program' -N0", "script.py"),
    # a word of the refusal: the options
    "from 0 to 1": ("-n", 2, "--stdin=2", "script.py"),
    "'-1'": ("-n", 2, "--stdin=-1", "script.py"),
    "got ''": ("-n", 2, "--stdin=", "script.py"),
    "mpiexec -n 3 python script.py 'an argument'": ("-n", 3, "--backend", "mpi", "script.py", "an argument"),
    "twice": ("--gpus", "0,0", "script.py"),
    "2 ranks": ("-n", 2, "--gpus", "0", "script.py"),
    "script.py/logs": ("-n", 1, "--log-dir", "script.py/logs", "script.py"),  # which is no folder
}


def test_what_cannot_run_is_refused_before_ranks_start(cli, script, tmp_path):
    script("print('a rank has started')")
    for word, code, out, err in refusals(cli, {word: ("run", *REFUSED[word]) for word in REFUSED}, tmp_path):
        assert (code, out) == (2, "")
        assert err.splitlines()[-1].startswith("gradsync: error: ")
        assert word in err


def test_gpus_are_those_of_the_ranks(cli, script):
    path = script("import os; print(os.environ['RANK'], os.environ['CUDA_VISIBLE_DEVICES'])")
    done = cli("run", "--no-prefix", "--gpus", "5,4", path, environment={"CUDA_VISIBLE_DEVICES": "3,4,5"})
    assert (done.code, sorted(done.out.splitlines())) == (0, ["0 5", "1 4"])


@pytest.mark.parametrize(
    ("statement", "code", "text"),
    [
        ("os._exit(4)", 4, "failed with exit code 4"),
        ("sys.exit('some text')", 1, "some text\n"),
        ("raise KeyboardInterrupt", 130, "failed with exit code 130"),
    ],
)
def test_the_exit_code_is_that_of_the_failing_rank(statement, code, text, cli, script):
    path = script(
        f"""
        import os, sys, signal
        if os.environ["RANK"] == "1":
            {statement}
        signal.pause()
        """
    )
    done = cli(*RUN, path)
    assert (done.code, done.out) == (code, "")
    assert text in done.err
    assert "rank 1 (pid" in done.err.splitlines()[-1]
    assert "Traceback" not in done.err


# Rank 1 fails at first; each start leaves files with a digest of its secret.
FALTERING = """
    import hashlib, os, sys
    from pathlib import Path
    import gradsync as gs
    from gradsync.environment import read_secret  # of an earlier start it must not open this one's server
    restart, state = os.environ["TORCHELASTIC_RESTART_COUNT"], Path(sys.argv[1])
    with gs.init_process_group() as comm:
        os.write(1, f"{restart} {sorted(path.name for path in state.iterdir())}\\n".encode())  # in one piece
        comm.barrier()
        (state / f"{restart}-{comm.rank}").write_text(hashlib.sha256(read_secret()).hexdigest())
        comm.barrier()
        if comm.rank == 1 and restart == "0":
            raise SystemExit(5)
"""


def test_ranks_start_again_with_a_new_secret_and_logs_of_their_own(cli, script, tmp_path):
    (tmp_path / "state").mkdir()
    logs = tmp_path / "logs"
    options = ("--max-restarts", 3, "--log-dir", logs)
    done = cli(*RUN, *options, script(FALTERING), tmp_path / "state")
    assert done.code == 0, done.err
    assert done.out.splitlines() == ["0 []"] * 2 + ["1 ['0-0', '0-1']"] * 2
    assert done.err.count("failed with exit code 5") == 1
    assert "restart 1 of at most 3" in done.err
    names = ["rank-0.log", "rank-0.restart-1.log", "rank-1.log", "rank-1.restart-1.log"]
    assert sorted(path.name for path in logs.iterdir()) == names
    assert (logs / "rank-1.restart-1.log").read_text() == "1 ['0-0', '0-1']\n"
    secrets = {path.name: path.read_text() for path in (tmp_path / "state").iterdir()}
    assert secrets["0-0"] == secrets["0-1"] != secrets["1-0"] == secrets["1-1"]


@pytest.mark.parametrize(("options", "reader"), [((), 0), (("--stdin", "none"), None)])
def test_one_rank_reads_standard_input(options, reader, cli, script):
    path = script("import os, sys; print(os.environ['RANK'], repr(sys.stdin.read()))")
    done = cli(*RUN, *options, path, typed="typed")
    assert sorted(done.out.splitlines()) == [f"{rank} {'typed' if rank == reader else ''!r}" for rank in range(2)]


def test_breakpoint_works_in_the_chosen_rank(cli, script):
    path = script(
        """
        import os
        name = "rank " + os.environ["RANK"]
        if name == "rank 1":
            breakpoint()
        print("after", name)
        """
    )
    done = cli("run", "-n", 2, "--stdin", 1, path, typed="p name.upper()\ncontinue\n")
    assert done.code == 0, done.err
    assert "'RANK 1'" in done.out
    assert "[rank 1] after rank 1" in done.out.replace("(Pdb) ", "")


def test_no_open_files_left_is_one_line_that_says_what_to_do(cli, script):
    few = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))  # noqa: E731
    done = cli("run", "-n", 6, script("import time; time.sleep(60)"), preexec_fn=few)
    assert (done.code, done.out) == (1, "")
    last = done.err.splitlines()[-1]
    assert last.startswith("gradsync: error: ")
    assert "ulimit -n" in last
    assert "Traceback" not in done.err


def test_a_large_number_of_ranks_that_nobody_has_named_is_told(cli, script, tmp_path):
    """A machine of 9 cores, as Python's own function tells it."""
    (tmp_path / "first").mkdir()
    script("import os\nos.sched_getaffinity = lambda pid: set(range(9))\n", "first/sitecustomize.py")
    variables = {"PYTHONPATH": str(tmp_path / "first"), "CUDA_VISIBLE_DEVICES": ""}
    path = script("raise SystemExit(3)")
    assert "starting 9 ranks" in cli("run", path, environment=variables).err


@pytest.mark.parametrize("launcher", [("PMI_RANK", "PMI_SIZE"), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")])
@pytest.mark.parametrize("rank", [0, 1])
def test_several_launchers_that_would_not_meet_are_told_once(launcher, rank, cli, script):
    """mpiexec -n 3 gradsync run."""
    variables = dict(zip(launcher, (str(rank), "3"), strict=True)) | {"SLURM_STEP_ID": "0"}
    done = cli("run", "-n", 1, "--backend", "local", script(""), environment=variables)
    assert done[:2] == (0, "")
    assert ("one of 3 launchers" in done.err) == (rank == 0)


def test_more_ranks_than_cores_are_told(cli, script, tmp_path):
    (tmp_path / "first").mkdir()
    script("import os\nos.sched_getaffinity = lambda pid: {0}\n", "first/sitecustomize.py")
    done = cli(*RUN, script(""), environment={"PYTHONPATH": str(tmp_path / "first")})
    assert done.told == (0, "", "gradsync: 2 ranks share 1 core, so that they often wait for each other\n")


# -- Where a launcher meets the machine's limits ----------------------------------------------------------------


@pytest.mark.parametrize("what", ["script.py", "-m module"])
def test_a_folder_that_is_gone_is_told(what, cli, tmp_path):
    (tmp_path / "gone").mkdir()
    line = f"run --no-prefix -n 2 {what}"
    command = f"cd {tmp_path}/gone && rmdir {tmp_path}/gone && exec {sys.executable} -m gradsync {line}"
    done = cli.program("sh", "-c", command)
    assert done.code == 2
    assert "Traceback" not in done.err
    assert "current directory has been removed" in done.err.splitlines()[-1]


def is_root_with(*programs):
    return os.geteuid() == 0 and all(map(shutil.which, programs))


@pytest.mark.slow
@pytest.mark.skipif(not is_root_with("unshare"), reason="needs root and unshare")
def test_without_proc_a_launcher_says_what_it_needs(cli, script):
    line = f"mount -t tmpfs t /proc; exec {sys.executable} -m gradsync run -n 2 {script('print(1)')}"
    done = cli.program("unshare", "-m", "sh", "-c", line)
    assert "/proc" in done.err


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("strace"), reason="needs strace")
def test_a_system_call_that_a_container_forbids_is_named(cli, script):
    injected = ("-e", "trace=memfd_create", "-e", "inject=memfd_create:error=EPERM")
    program = (sys.executable, "-m", "gradsync", "run", "-n", 2, script("print(1)"))
    done = cli.program("strace", "-f", "-qq", "-o", os.devnull, *injected, *program)
    assert done.code == 1
    assert "memfd_create" in done.err


@pytest.mark.slow
@pytest.mark.skipif(not is_root_with("unshare"), reason="needs root and unshare")
@pytest.mark.parametrize("way", ["run", "by hand"])
def test_without_a_folder_for_temporary_files_ranks_meet_or_are_told(way, cli, script):
    """A container with a read-only file system."""
    path = script("import gradsync as gs\nwith gs.init_process_group() as comm: print(comm.world_size)")
    read_only = "mount --bind / / && mount -o remount,ro,bind / && "
    python = sys.executable
    by_hand = (
        f"export MASTER_ADDR=127.0.0.1 MASTER_PORT=29490 WORLD_SIZE=2; RANK=0 {python} {path} & "
        f"RANK=1 {python} {path}; wait $!"
    )
    line = f"exec {python} -m gradsync run --no-prefix -n 2 {path}" if way == "run" else by_hand
    done = cli.program("unshare", "-m", "sh", "-c", read_only + line)
    assert done.out == "2\n" * 2 or (
        way == "by hand" and "InvalidArgument: " in done.err and "XDG_RUNTIME_DIR" in done.err
    )


@pytest.mark.slow
@pytest.mark.skipif(not os.access("/sys/fs/cgroup/pids", os.W_OK), reason="needs control groups of version 1, and root")
@pytest.mark.parametrize("limit", [4, 6, 8])
def test_a_limit_of_threads_is_told_with_the_remedy(limit, cli, script):
    group = f"/sys/fs/cgroup/pids/gradsync-test-{os.getpid()}"
    os.mkdir(group)
    try:
        with open(f"{group}/pids.max", "w") as file:
            file.write(str(limit))
        path = script("import gradsync as gs\nwith gs.init_process_group() as comm: comm.barrier()")
        line = f"echo $$ > {group}/cgroup.procs; exec {sys.executable} -m gradsync run -n 2 {path}"
        done = cli.program("bash", "-c", line, stdout=subprocess.PIPE)
        assert done.code != 0
        assert "can't start new thread" not in done.err
    finally:
        cli.close()  # a group goes when its processes have gone
        os.rmdir(group)


def test_ranks_that_all_train_alone_are_told(cli, script):
    """No rank has called init_process_group: as many full trainings as there are ranks."""
    done = cli(*RUN, script("import os; os.write(1, b'training everything\\n')"))
    assert (done.code, done.out) == (0, "training everything\n" * 2)
    assert "init_process_group" in done.err
