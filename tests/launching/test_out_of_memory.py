"""Real kills by the kernel's out-of-memory killer, and memory limits, where control groups can be made."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
from pathlib import Path

import command
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "benchmarks"))

from failures.confinement import Unavailable, small_memory

MIB = 1 << 20
KILLED = "the kernel's out-of-memory killer ended it"


# Runs in the small group: watches, has a child allocate until it is killed, and prints what the watch tells.
IN_THE_GROUP = """
import os, signal, sys
from gradsync.launching.outcome import OomWatch

watch = OomWatch()
before = watch.has_killed()
child = os.fork()
if child == 0:
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    held = []
    while True:
        held.append(b"x" * (1 << 20))
_, status = os.waitpid(child, 0)
print(before, os.waitstatus_to_exitcode(status), watch.has_killed())
child = os.fork()
if child == 0:
    os.kill(os.getpid(), signal.SIGKILL)
os.waitpid(child, 0)
print(OomWatch().has_killed())  # this one begins now
"""


@pytest.fixture
def entering_small_memory():
    """Gives Python code that enters a new memory control group; skips the test where that is not allowed."""
    with contextlib.ExitStack() as stack:

        def enter(limit_bytes, *, counts_kills=False):
            try:
                door = stack.enter_context(small_memory(limit_bytes))
            except Unavailable as error:
                pytest.skip(str(error))
            if counts_kills and not door.with_name("memory.events").exists():
                pytest.skip("only control groups of version 2 tell of their kills")
            return f"open({str(door)!r}, 'w').write('0')\n"

        yield enter


def test_real_kill_is_told_from_another_sigkill(entering_small_memory):
    program = [sys.executable, "-W", "ignore", "-c", entering_small_memory(64 * MIB, counts_kills=True) + IN_THE_GROUP]
    done = subprocess.run(program, capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["False -9 True", "False"]


def test_shared_memory_beyond_the_limit_of_the_control_group_is_an_error_and_no_kill(entering_small_memory):
    """The machine has more; what is touched beyond the group's limit ends the process."""
    allocate = """
from gradsync.communicators.shared_memory.segment import create_segment
from gradsync.errors import BackendUnavailable
create_segment(16 << 20)
try:
    create_segment(100 << 20)
except BackendUnavailable as error:
    print(error)
"""
    program = [sys.executable, "-W", "ignore", "-c", entering_small_memory(96 * MIB) + allocate]
    done = subprocess.run(program, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    told = re.fullmatch(r"cannot allocate 104857600 bytes of shared memory: (\d+) bytes are available\n", done.stdout)
    assert told
    assert 16 * MIB < int(told[1]) < 80 * MIB


def test_run_reports_a_rank_that_the_kernel_has_ended(entering_small_memory, tmp_path):
    script = command.write_script(
        tmp_path,
        """
        import os, signal
        if os.environ["RANK"] == "1":
            open("/proc/self/oom_score_adj", "w").write("1000")  # this rank, and no other process of the run
            held = []
            while True:
                held.append(b"x" * (1 << 20))
        signal.pause()
        """,
    )
    enter_and_run = (
        f"import os, sys; {entering_small_memory(256 * MIB, counts_kills=True)}os.execv(sys.executable, sys.argv[1:])"
    )
    launcher = [sys.executable, "-m", "gradsync", "run", "-n", "2", script]
    program = [sys.executable, "-W", "ignore", "-c", enter_and_run, *launcher]
    done = subprocess.run(program, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 128 + signal.SIGKILL
    last = done.stderr.splitlines()[-1]
    assert last.startswith("gradsync: rank 1 (pid ")
    assert f"was killed by SIGKILL: {KILLED}; it had used " in last
