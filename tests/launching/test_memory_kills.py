"""The counters of the kernel's out-of-memory killer: in made-up files, and with a real kill where that can be."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

from gradsync.launching.outcome import OomWatch, kind_of_memory

MIB = 1 << 20
KILLED = "the kernel's out-of-memory killer ended it"


class Machine:
    """Made-up /proc and control groups in a directory."""

    def __init__(self, directory, cgroup, kills=0):
        self.directory = directory
        self.write("proc/self/cgroup", cgroup)
        self.machine_kills(kills)

    def write(self, path, text):
        file = self.directory / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def machine_kills(self, count):
        self.write("proc/vmstat", f"nr_free_pages 12\noom_kill {count}\nswpin 3\n")

    def group_v1(self, path, kills, hits, limit=9223372036854771712):
        self.write(f"sys/fs/cgroup/{path}/memory.oom_control", f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n")
        self.write(f"sys/fs/cgroup/{path}/memory.failcnt", f"{hits}\n")
        self.write(f"sys/fs/cgroup/{path}/memory.limit_in_bytes", f"{limit}\n")

    def group_v2(self, path, kills, hits, limit="max"):
        self.write(
            f"sys/fs/cgroup/{path}/memory.events",
            f"low 0\nhigh 0\nmax 9\noom {hits}\noom_kill {kills}\noom_group_kill 0\n",
        )
        self.write(f"sys/fs/cgroup/{path}/memory.max", f"{limit}\n")


@pytest.fixture
def v2(tmp_path):
    machine = Machine(tmp_path, "0::/slice/job/ours\n", kills=7)
    machine.group_v2("slice", 5, 2, 64 << 30)
    machine.group_v2("slice/job", 4, 1, 24 << 30)
    machine.group_v2("slice/job/ours", 3, 0)
    return machine


def test_kill_by_a_limit_above_the_group_names_that_limit(v2):
    watch = OomWatch(str(v2.directory))
    assert (watch.kills(), watch.describe()) == (0, "")
    v2.group_v2("slice", 7, 3, 64 << 30)
    v2.group_v2("slice/job", 6, 2, 24 << 30)
    v2.group_v2("slice/job/ours", 5, 0)
    assert watch.kills() == 2
    assert watch.describe() == f"{KILLED} (memory limit of the control group: 24 GB)"


def test_kill_without_a_limit_is_the_machine(v2):
    watch = OomWatch(str(v2.directory))
    v2.group_v2("slice/job/ours", 4, 0)
    v2.machine_kills(8)
    assert watch.describe() == f"{KILLED} (the machine was out of memory)"


def test_kills_among_neighbours_are_not_ours(v2):
    watch = OomWatch(str(v2.directory))
    v2.group_v2("slice", 9, 4, 64 << 30)
    v2.group_v2("slice/job", 8, 3, 24 << 30)
    v2.machine_kills(20)
    assert (watch.kills(), watch.describe()) == (0, "")


def test_version_1_beside_a_version_2_without_memory(tmp_path):
    machine = Machine(tmp_path, "garbage\n9:name=systemd:/\n4:cpu,memory:/ours\n0::/\n")
    machine.group_v1("memory", 0, 0)
    machine.group_v1("memory/ours", 1, 10, 512 * MIB)
    watch = OomWatch(str(tmp_path))
    machine.group_v1("memory/ours", 2, 30, 512 * MIB)
    assert watch.kills() == 1
    assert watch.describe() == f"{KILLED} (memory limit of the control group: 512 MB)"


def test_version_1_limit_above_a_group_without_one(tmp_path):
    machine = Machine(tmp_path, "4:memory:/job/ours\n")
    machine.group_v1("memory", 0, 0)
    machine.group_v1("memory/job", 0, 10, 3 << 30)
    machine.group_v1("memory/job/ours", 1, 0)
    watch = OomWatch(str(tmp_path))
    machine.group_v1("memory/job", 0, 20, 3 << 30)
    machine.group_v1("memory/job/ours", 2, 1)
    assert watch.describe() == f"{KILLED} (memory limit of the control group: 3 GB)"


@pytest.mark.parametrize("path", ["/docker/abc", "/", "/../../other", "/docker/abc/inner"])
def test_containers_see_their_group_at_the_mount_point(tmp_path, path):
    machine = Machine(tmp_path, f"0::{path}\n")
    machine.group_v2("", 0, 0, 100 * MIB)
    watch = OomWatch(str(tmp_path))
    machine.group_v2("", 1, 1, 100 * MIB)
    assert watch.kills() == 1
    assert "100 MB" in watch.describe()


def test_without_a_group_the_machine_counts_and_the_text_is_careful(tmp_path):
    machine = Machine(tmp_path, "0::/\n", kills=4)
    watch = OomWatch(str(tmp_path))
    machine.machine_kills(5)
    assert watch.kills() == 1
    assert watch.describe() == (
        "perhaps the kernel's out-of-memory killer, which ended a process on this machine during the run"
    )


def test_missing_files_count_as_nothing(tmp_path):
    watch = OomWatch(str(tmp_path / "nowhere"))
    assert (watch.kills(), watch.describe()) == (0, "")


def test_group_that_goes_away_counts_as_nothing(v2):
    watch = OomWatch(str(v2.directory))
    for name in ("memory.events", "memory.max"):
        (v2.directory / "sys/fs/cgroup/slice/job/ours" / name).unlink()
    assert (watch.kills(), watch.describe()) == (0, "")


@pytest.mark.parametrize(
    ("summary", "kind"),
    [
        ("MemoryError", "host memory"),
        ("numpy._core._exceptions._ArrayMemoryError: Unable to allocate 1. TiB for an array", "host memory"),
        ("OSError: [Errno 12] Cannot allocate memory", "host memory"),
        ("cupy.cuda.memory.OutOfMemoryError: Out of memory allocating 1,024 bytes", "GPU memory"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB.", "GPU memory"),
        ("RuntimeError: CUDA error: out of memory", "GPU memory"),
        ("cupy_backends.cuda.api.runtime.CUDARuntimeError: cudaErrorMemoryAllocation: out of memory", "GPU memory"),
        ("cupy_backends.cuda.api.driver.CUDADriverError: CUDA_ERROR_OUT_OF_MEMORY: out of memory", "GPU memory"),
        ("CUBLASError: CUBLAS_STATUS_ALLOC_FAILED", "GPU memory"),
        ("ValueError: out of memory of my youth", None),
        ("OSError: [Errno 2] No such file or directory: 'MemoryError'", None),
        ("", None),
    ],
)
def test_exceptions_tell_which_memory_was_too_small(summary, kind):
    assert kind_of_memory(summary) == kind


def test_the_exceptions_of_numpy_are_known():
    import numpy as np

    with pytest.raises(MemoryError) as raised:
        np.empty(1 << 60, np.uint8)
    assert kind_of_memory(f"{raised.type.__module__}.{raised.type.__qualname__}: {raised.value}") == "host memory"
