"""PlanMismatch shows the line of the program at which each rank is, on every rank and in the launcher's report."""

from __future__ import annotations

import inspect
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradsync as gs
from contract import expect
from gradsync.errors import Caller, caller
from kits import make_kit
from places import SHM, STAND_IN, Place, on

PLACES = [*on(SHM, 2, 3), *on(STAND_IN, 2)]


def line_of(mark: str) -> int:
    """Returns the number of this file's line that ends in such a comment."""
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith(f"# {mark}"))


def at(mark: str, function: str) -> str:
    return f"{__file__}:{line_of(mark)} in {function}"


def train(callback: Any, kit: Any, names: str) -> None:
    with callback.backward():  # the end of the block
        for name in names:
            callback(name, kit.put(np.ones(10)))  # hands over


def gradients_in_another_order(comm: Any, kit: Any) -> None:
    callback = gs.AllreduceCallback("mean", comm, threshold_bytes=160)
    train(callback, kit, "ab" if comm.rank == 0 else "ba")


def a_flush_too_early(comm: Any, kit: Any) -> None:
    callback = gs.AllreduceCallback("mean", comm, threshold_bytes=80)
    train(callback, kit, "a" if comm.rank == 0 else "ab")


def other_collectives(comm: Any, kit: Any) -> None:
    if comm.rank == 0:
        comm.all_reduce(kit.put(np.ones(3)))  # reduces
    else:
        comm.barrier()  # waits


def other_asynchronous_collectives(comm: Any, kit: Any) -> None:
    if comm.rank == 0:
        future = comm.asynchronous.all_reduce(kit.put(np.ones(3)))  # submits a reduction
    else:
        future = comm.asynchronous.barrier()  # submits a barrier
    future.result()


def objects_and_averages(comm: Any, kit: Any) -> None:
    if comm.rank == 0:
        comm.objects.all_gather("an object")  # gathers objects
    else:
        gs.average_gradients({"a": kit.put(np.ones(3))}, communicator=comm)  # averages


def a_group_of_the_last_two(comm: Any, kit: Any) -> None:
    group = comm.new_group([comm.world_size - 2, comm.world_size - 1])
    if not group:
        raise gs.PlanMismatch("not a member")
    if group.rank == 0:
        group.all_reduce(kit.put(np.ones(3)))  # reduces in the group
    else:
        group.barrier()  # waits in the group


def messages_of_other_shapes(comm: Any, kit: Any) -> None:
    if comm.rank == 0:
        comm.send(kit.put(np.ones(3)), 1)  # sends
    elif comm.rank == 1:
        comm.recv(kit.put(np.ones(4)), 0)  # receives
    else:
        raise gs.PlanMismatch("no part in it")


def a_long_list(comm: Any, kit: Any) -> None:
    """What is told of it is longer than there is room for."""
    callback = gs.AllreduceCallback("mean", comm)
    for number in range(400):
        callback(f"{'x' * 200}{number}{comm.rank}", kit.put(np.ones(1)))
    callback.flush()  # ends the long list


def mismatches_of(comm: Any, kit_name: str, scenes: list[str]) -> list[tuple[str, dict[int, str], dict[int, str]]]:
    kit, found = make_kit(comm, kit_name), []
    for scene in scenes:
        error = expect(gs.PlanMismatch, lambda s=scene: globals()[s](comm, kit))
        assert float(kit.get(comm.all_reduce(kit.put(np.ones(1))))[0]) == comm.world_size  # it can go on
        found.append((str(error), error.places, error.descriptions))
    return found


SCENES: dict[str, tuple[str, str]] = {
    "gradients_in_another_order": (at("hands over", "train"),) * 2,
    "a_flush_too_early": (at("the end of the block", "train"), at("hands over", "train")),
    "other_collectives": (at("reduces", "other_collectives"), at("waits", "other_collectives")),
    "other_asynchronous_collectives": (
        at("submits a reduction", "other_asynchronous_collectives"),
        at("submits a barrier", "other_asynchronous_collectives"),
    ),
    "objects_and_averages": (at("gathers objects", "objects_and_averages"), at("averages", "objects_and_averages")),
    "a_long_list": (at("ends the long list", "a_long_list"),) * 2,
}


@pytest.mark.parametrize(("place", "world_size"), PLACES)
def test_every_rank_shows_the_line_of_each(place: Place, world_size: int) -> None:
    for found in place.run(world_size, mismatches_of, place.kit, list(SCENES)):
        for (text, places, descriptions), (first, others) in zip(found, SCENES.values(), strict=True):
            assert places == {0: first} | dict.fromkeys(range(1, world_size), others)
            for rank, line in places.items():
                shown = next(part for part in text.splitlines() if part.startswith(f"  rank {rank}: "))
                assert shown.endswith(f"at {line}")
                assert line not in descriptions[rank]  # those compare what is called, not where


@pytest.mark.parametrize(("place", "world_size"), PLACES)
def test_both_ranks_of_a_message_show_the_lines(place: Place, world_size: int) -> None:
    function = "messages_of_other_shapes"
    told = place.run(world_size, mismatches_of, place.kit, [function])
    for [(text, places, _)] in told[:2]:
        assert places == {0: at("sends", function), 1: at("receives", function)}
        assert all(f"at {line}" in text for line in places.values())


@pytest.mark.parametrize(("place", "world_size"), PLACES)
def test_lines_are_by_the_ranks_of_the_world(place: Place, world_size: int) -> None:
    function = "a_group_of_the_last_two"
    told = place.run(world_size, mismatches_of, place.kit, [function])
    lines = at("reduces in the group", function), at("waits in the group", function)
    assert [places for [(_, places, _)] in told[-2:]] == [
        dict(zip((world_size - 2, world_size - 1), lines, strict=True))
    ] * 2


SCRIPT = """
import numpy as np
import gradsync as gs

def step(sync, names):
    with sync.backward():
        for name in names:
            sync(name, np.ones(3))

with gs.init_process_group(backend="shm") as comm:
    sync = gs.AllreduceCallback("mean", threshold_bytes=24)
    if comm.rank == 0:
        step(sync, "ab")
    else:
        comm.barrier()
"""


def test_the_launcher_reports_both_lines(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.lstrip())
    command = [sys.executable, "-m", "gradsync", "run", "-n", "2", "train.py"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode != 0
    made = "made at train.py:10 in <module>"
    assert f"  rank 0: the first use of a callback ({made}), at {script}:7 in step\n" in ended.stderr
    assert f"  rank 1: barrier, at {script}:14 in <module>\n" in ended.stderr


def test_the_callers_line_is_that_of_the_program_not_of_packages(tmp_path: Path) -> None:
    package = tmp_path / "site-packages" / "other.py"
    package.parent.mkdir()
    source = "def call(function):\n    return function()\n"
    names: dict[str, Any] = {}
    exec(compile(source, str(package), "exec"), names)
    found = names["call"](caller)
    assert found.code is inspect.currentframe().f_code  # type: ignore[union-attr]
    assert str(found).startswith(f"{__file__}:")
    odd = Caller(compile("pass", f"{'d/' * 500}two\nlines.py", "exec"), 0)
    assert len(str(odd)) < 400
    assert "\n" not in str(odd)
    assert str(odd).endswith("/two?lines.py:1 in <module>")


def test_lines_travel_with_the_error() -> None:
    error = pickle.loads(pickle.dumps(gs.PlanMismatch("x", places={1: "train.py:6 in step"})))
    assert error.places == {1: "train.py:6 in step"}
    assert gs.PlanMismatch("x").places == {}
