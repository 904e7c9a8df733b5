"""Which machine this is, and what its processes do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from gradsync.machine import boot_id, machine_identity, read_stat


def test_machine_is_the_same_for_all_processes_of_a_pid_namespace() -> None:
    code = "from gradsync.machine import machine_identity; print(machine_identity())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == machine_identity()
    assert machine_identity().startswith(boot_id())
    assert "pid:[" in machine_identity()


def test_a_process_is_told_by_state_parent_and_start() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with child:
        own, its = read_stat(os.getpid()), read_stat(child.pid)
        assert own is not None
        assert its is not None
        assert (own.state, own.parent) == ("R", os.getppid())
        assert its.parent == os.getpid()
        assert int(own.start_time) <= int(its.start_time)
        child.send_signal(signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        stopped = read_stat(child.pid)
        assert stopped == its._replace(state="T")
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        ended = read_stat(child.pid)
        assert ended == its._replace(state="Z")
    assert read_stat(child.pid) is None


def test_a_name_that_looks_like_a_state_misleads_nobody(tmp_path: Path) -> None:
    program = tmp_path / "x) T 1 ("
    program.symlink_to(sys.executable)
    with subprocess.Popen([program, "-c", "input()"], stdin=subprocess.PIPE) as process:
        found = read_stat(process.pid)
        assert found is not None
        assert (found.parent, found.state != "T") == (os.getpid(), True)
        process.kill()
