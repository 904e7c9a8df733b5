"""What can still be allocated, by the kernel's own account, in made-up files; with real groups in tests/launching."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from gradsync.machine import available_memory_bytes


@pytest.fixture
def machine(tmp_path: Path):
    """Returns a function that writes files below the folder, and asks."""

    def ask(files: dict[str, str], cgroup: str = "0::/slice/leaf\n") -> float:
        for name, text in ({"proc/self/cgroup": cgroup} | files).items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return available_memory_bytes(str(tmp_path))

    return ask


def of_group(path: str, limit: str, used: int, unused: int = 0) -> dict[str, str]:
    return {
        f"sys/fs/cgroup/{path}/memory.events": "oom_kill 0\n",
        f"sys/fs/cgroup/{path}/memory.max": f"{limit}\n",
        f"sys/fs/cgroup/{path}/memory.current": f"{used}\n",
        f"sys/fs/cgroup/{path}/memory.stat": f"anon 1\ninactive_file {unused}\n",
    }


def test_the_least_of_the_machine_and_all_groups_counts(machine) -> None:
    free = {"proc/meminfo": "MemTotal: 100 kB\nMemAvailable: 50 kB\n"}
    assert machine(free) == 50 * 1024
    assert machine(of_group("slice/leaf", "max", 900)) == 50 * 1024
    assert machine(of_group("slice", "1000", 900)) == 100
    assert machine(of_group("slice/leaf", "500", 480, unused=30)) == 50  # files that nobody uses are dropped first
    assert machine(of_group("slice/leaf", "500", 600)) == 0


def test_a_group_whose_parent_keeps_the_memory_controller_has_the_parents_limit(machine) -> None:
    """It has none of the controller's files."""
    assert machine({"proc/meminfo": "MemAvailable: 50 kB\n", **of_group("slice", "1000", 900)}) == 100


def test_a_kernel_that_counts_no_kills_has_limits_all_the_same(machine) -> None:
    """Linux before 4.13 counts none, and neither does gVisor."""
    group = of_group("slice", "1000", 900)
    del group["sys/fs/cgroup/slice/memory.events"]
    assert machine(group) == 100


def test_a_kernel_that_says_nothing_limits_nothing(machine) -> None:
    assert machine({}) == math.inf
    assert machine({"proc/meminfo": "MemAvailable: lots kB\n"}) == math.inf
