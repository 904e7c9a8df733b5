"""Memory: what the kernel's out-of-memory killer has ended, and what can still be allocated.

With made-up files of the kernel, since real limits need root; through private functions where the files must change
while the launcher looks from time to time, or before it has started.
"""

import math
import os
import signal

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


def test_a_rank_that_the_kernel_ended_is_told_apart_from_one_that_the_launcher_ended(cli, script, kernel, tmp_path):
    """As far as the launcher can see: it finds its control group in our folder."""
    (tmp_path / "first").mkdir()
    script(
        f"""
        import builtins, io
        plain_open = io.open
        def open_ours(path, *args, **options):
            is_group = str(path).startswith(("/sys/fs/cgroup", "/proc/self/cgroup"))
            return plain_open({str(kernel.folder)!r} + path if is_group else path, *args, **options)
        builtins.open = io.open = open_ours
        """,
        "first/sitecustomize.py",
    )
    path = script(
        """
        import os, signal, sys
        if os.environ["RANK"] == "0":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            open(sys.argv[1], "w").close()
            signal.pause()
        open(sys.argv[1]).close()  # waits for rank 0
        with open("/sys/fs/cgroup/slice/ours/memory.events", "w") as events:
            events.write("oom_kill 4\\n")
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    os.mkfifo(tmp_path / "fifo")
    environment = {"PYTHONPATH": str(tmp_path / "first")}
    done = cli("run", "-n", 2, "--grace", 0.2, path, tmp_path / "fifo", environment=environment)
    assert done.code == 128 + signal.SIGKILL
    assert "out-of-memory killer" in done.err.splitlines()[-1]
    assert "rank 1 (pid" in done.err.splitlines()[-1]
    assert done.err.count("out-of-memory killer") == 1
