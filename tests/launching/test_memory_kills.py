"""The kernel's count of out-of-memory kills, in made-up files; test_out_of_memory has real kills."""

from __future__ import annotations

import pytest

from gradsync.launching.outcome import OomWatch


class Machine:
    """Made-up /proc and control groups in a directory."""

    def __init__(self, directory, cgroup):
        self.directory = directory
        self.write("proc/self/cgroup", cgroup)

    def write(self, path, text):
        file = self.directory / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def group(self, path, kills):
        self.write(f"sys/fs/cgroup/{path}/memory.events", f"low 0\noom 9\noom_kill {kills}\noom_group_kill 0\n")
        self.write(f"sys/fs/cgroup/{path}/memory.max", "max\n")


@pytest.fixture
def machine(tmp_path):
    machine = Machine(tmp_path, "0::/slice/ours\n")
    machine.group("slice", 4)
    machine.group("slice/ours", 3)
    return machine


def test_kills_of_this_group_count(machine):
    watch = OomWatch(str(machine.directory))
    assert not watch.has_killed()
    machine.group("slice/ours", 5)
    assert watch.has_killed()
    assert watch.has_killed()  # of two ranks both are told


def test_an_earlier_kill_that_the_program_has_survived_is_not_blamed(machine):
    watch = OomWatch(str(machine.directory))
    machine.group("slice/ours", 4)  # a worker of a data loader
    watch.look()
    assert watch.has_killed()  # a process with much memory needs a moment to end
    watch.look()
    assert not watch.has_killed()
    machine.group("slice/ours", 5)
    assert watch.has_killed()


def test_kills_among_neighbours_are_not_ours(machine):
    watch = OomWatch(str(machine.directory))
    machine.group("slice", 9)
    assert not watch.has_killed()


@pytest.mark.parametrize("path", ["/docker/abc", "/", "/../../other", "/docker/abc/inner"])
def test_containers_see_their_group_at_the_mount_point(tmp_path, path):
    machine = Machine(tmp_path, f"0::{path}\n")
    machine.group("", 0)
    watch = OomWatch(str(tmp_path))
    machine.group("", 1)
    assert watch.has_killed()


def test_version_1_tells_nothing(tmp_path):
    machine = Machine(tmp_path, "4:cpu,memory:/ours\n0::/\n")
    for name in ("memory.oom_control", "memory.limit_in_bytes"):
        machine.write(f"sys/fs/cgroup/memory/ours/{name}", "1\n")
    watch = OomWatch(str(tmp_path))
    machine.write("sys/fs/cgroup/memory/ours/memory.oom_control", "oom_kill 1\n")
    assert not watch.has_killed()


def test_missing_files_count_as_nothing(tmp_path):
    assert not OomWatch(str(tmp_path / "nowhere")).has_killed()


def test_group_that_goes_away_counts_as_nothing(machine):
    watch = OomWatch(str(machine.directory))
    (machine.directory / "sys/fs/cgroup/slice/ours/memory.events").unlink()
    assert not watch.has_killed()
