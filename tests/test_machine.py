"""Which machine this is."""

from __future__ import annotations

import subprocess
import sys

from gradsync.machine import boot_id, machine_identity


def test_machine_is_the_same_for_all_processes_of_a_pid_namespace() -> None:
    code = "from gradsync.machine import machine_identity; print(machine_identity())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == machine_identity()
    assert machine_identity().startswith(boot_id())
    assert "pid:[" in machine_identity()
