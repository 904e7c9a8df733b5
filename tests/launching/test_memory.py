"""Memory: what the kernel's out-of-memory killer has ended, and what can still be allocated.

With made-up files of the kernel, through private functions, since real limits need root; with real ones at the end.
"""

import contextlib
import math
import os
import signal
import sys
from pathlib import Path

import pytest

from gradsync.launching.outcome import OomWatch
from gradsync.machine import available_memory_bytes


class Kernel:
    """Made-up /proc and control groups."""

    def __init__(self, folder, cgroup="0::/slice/ours\n"):
        self.folder = folder
        self.write({"proc/self/cgroup": cgroup})

    def write(self, files):
        for name, text in files.items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def group(self, path, kills):
        self.write(
            {
                f"sys/fs/cgroup/{path}/memory.events": f"low 0\noom 9\noom_kill {kills}\noom_group_kill 0\n",
                f"sys/fs/cgroup/{path}/memory.max": "max\n",
            }
        )


@pytest.fixture
def kernel(tmp_path):
    kernel = Kernel(tmp_path)
    kernel.group("slice", 4)
    kernel.group("slice/ours", 3)
    return kernel


def test_a_kill_in_this_group_counts_until_the_program_has_survived_it(kernel):
    watch = OomWatch(str(kernel.folder))
    kernel.group("slice", 9)  # among neighbours
    assert not watch.has_killed()
    kernel.group("slice/ours", 4)
    assert watch.has_killed()
    assert watch.has_killed()  # for two ranks alike
    watch.look()
    assert watch.has_killed()  # a process with much memory needs a moment to end
    watch.look()
    assert not watch.has_killed()  # it was a worker of a data loader
    kernel.group("slice/ours", 5)
    assert watch.has_killed()


@pytest.mark.parametrize("path", ["/docker/abc", "/", "/../../other", "/docker/abc/inner"])
def test_containers_see_their_group_at_the_mount_point(path, tmp_path):
    kernel = Kernel(tmp_path, f"0::{path}\n")
    kernel.group("", 0)
    watch = OomWatch(str(tmp_path))
    kernel.group("", 1)
    assert watch.has_killed()


def test_what_the_kernel_does_not_tell_is_no_kill(kernel, tmp_path):
    assert not OomWatch(str(tmp_path / "nowhere")).has_killed()
    watch = OomWatch(str(kernel.folder))
    (kernel.folder / "sys/fs/cgroup/slice/ours/memory.events").unlink()
    assert not watch.has_killed()
    old = Kernel(tmp_path / "version 1", "4:cpu,memory:/ours\n0::/\n")
    watch = OomWatch(str(old.folder))
    old.write({"sys/fs/cgroup/memory/ours/memory.oom_control": "oom_kill 1\n"})
    assert not watch.has_killed()


def limits(path, limit, used, unused=0):
    return {
        f"sys/fs/cgroup/{path}/memory.events": "oom_kill 0\n",
        f"sys/fs/cgroup/{path}/memory.max": f"{limit}\n",
        f"sys/fs/cgroup/{path}/memory.current": f"{used}\n",
        f"sys/fs/cgroup/{path}/memory.stat": f"anon 1\ninactive_file {unused}\n",
    }


FREE = {"proc/meminfo": "MemTotal: 100 kB\nMemAvailable: 50 kB\n"}


@pytest.mark.parametrize(
    ("files", "available"),
    [
        ([FREE], 50 * 1024),
        ([FREE, limits("slice/ours", "max", 900)], 50 * 1024),
        ([FREE, limits("slice", "1000", 900)], 100),  # also where this group has none of the controller's files
        ([FREE, limits("slice/ours", "500", 480, unused=30)], 50),  # files that nobody uses are dropped first
        ([FREE, limits("slice/ours", "500", 600)], 0),
        ([], math.inf),
        ([{"proc/meminfo": "MemAvailable: lots kB\n"}], math.inf),
    ],
)
@pytest.mark.parametrize("counts_kills", [True, False])  # Linux before 4.13 and gVisor count none
def test_the_least_of_the_machine_and_all_groups_is_available(files, available, counts_kills, tmp_path):
    kernel = Kernel(tmp_path)
    for each in files:
        kernel.write({name: text for name, text in each.items() if counts_kills or not name.endswith("events")})
    assert available_memory_bytes(str(tmp_path)) == available


# -- Real groups -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def small_group(limit_bytes):
    """A new control group with little memory, of either version; gives shell code that enters it."""
    for parent, limit in (("/sys/fs/cgroup", "memory.max"), ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")):
        group = Path(parent, f"gradsync-test-{os.getpid()}")
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / limit).write_text(str(limit_bytes))
            yield group
            return
        except OSError:
            continue
        finally:
            with contextlib.suppress(OSError):
                group.rmdir()
    pytest.skip("control groups with a memory limit cannot be made here")


@pytest.mark.slow
def test_a_rank_that_the_kernel_ends_for_want_of_memory_is_told_so(cli, script):
    path = script(
        """
        import os, signal
        if os.environ["RANK"] == "1":
            open("/proc/self/oom_score_adj", "w").write("1000")  # this rank, and no other process of the run
            held = []
            while True:
                held.append(b"x" * (1 << 20))
        signal.pause()
        """
    )
    with small_group(256 << 20) as group:
        if not (group / "memory.events").exists():
            pytest.skip("only control groups of version 2 tell of their kills")
        line = f"echo $$ > {group}/cgroup.procs; exec {sys.executable} -m gradsync run -n 2 {path}"
        done = cli.program("sh", "-c", line)
    assert done.code == 128 + signal.SIGKILL
    assert "out-of-memory killer" in done.err.splitlines()[-1]
