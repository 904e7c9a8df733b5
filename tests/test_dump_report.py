"""What gradsync trace says of dumps: differences and circles first, then progress, then each rank."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import gradsync as gs
from gradsync.cli import main

pytestmark = pytest.mark.usefixtures("forgotten_recorders")


@pytest.mark.parametrize("is_damaged", [False, True])
def test_what_cannot_be_read_is_exit_code_2(tmp_path: Path, is_damaged: bool) -> None:
    if is_damaged:
        (tmp_path / "a.json").write_text("{")
    done = CliRunner().invoke(main, ["trace", str(tmp_path)])
    assert done.exit_code == 2
    assert "a.json" in done.output if is_damaged else "there are no dumps" in done.output


@pytest.mark.timeout(20)
@pytest.mark.parametrize("by_folder", [False, True])
def test_a_fifo_is_refused(tmp_path: Path, by_folder: bool) -> None:
    """Opening it would wait for a writer."""
    fifo = tmp_path / "fifo.json"
    os.mkfifo(fifo)
    done = CliRunner().invoke(main, ["trace", str(tmp_path if by_folder else fifo)])
    assert (done.exit_code, "it needs to be a regular file" in done.output) == (2, True)


def test_a_picture_beside_the_dumps_is_no_dump(tmp_path: Path) -> None:
    with gs.init_process_group("local"):
        gs.dump_flight_recorder(tmp_path)
    for _ in range(2):
        done = CliRunner().invoke(main, ["trace", str(tmp_path), "--out", str(tmp_path / "trace.json")])
        assert done.exit_code == 0, done.output


def test_a_damaged_dump_is_named_with_what_is_wrong(tmp_path: Path) -> None:
    path = gs.dump_flight_recorder(tmp_path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pid": "many"}))
    done = CliRunner().invoke(main, ["trace", str(tmp_path)])
    assert done.exit_code == 2
    assert path.name in done.output.replace("\n", "")
    assert "is damaged" in done.output


def test_of_two_dumps_of_a_rank_the_latest_counts(tmp_path: Path) -> None:
    told = []
    for calls in (1, 5):
        with gs.init_process_group("local") as comm:
            for _ in range(calls):
                comm.barrier()
            gs.dump_flight_recorder(tmp_path / f"{9 - calls}.json")  # the names say nothing of their order
        told.append(CliRunner().invoke(main, ["trace", str(tmp_path)]).output)
    assert "rank 0 has begun 1 collectives" in told[0]
    assert "rank 0 has begun 5 collectives" in told[1]


def test_dumps_of_no_rank_are_said_to_be_such(tmp_path: Path) -> None:
    path = gs.dump_flight_recorder(tmp_path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rank": None}))
    done = CliRunner().invoke(main, ["trace", str(tmp_path)])
    assert (done.exit_code, "contains a rank: all" in done.output) == (2, True)


def test_a_dump_of_the_first_edition_is_refused_with_its_version(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"format": "gradsync flight recorder 1", "rank": 0}))
    done = CliRunner().invoke(main, ["trace", str(tmp_path)])
    assert (done.exit_code, "was written by gradsync 0.1" in done.output) == (2, True)


def test_the_gradients_that_a_rank_has_not_handed_over_are_named(tmp_path: Path) -> None:
    with gs.init_process_group("local") as comm:
        sync = gs.AllreduceCallback("mean", comm)
        with sync.backward():
            for number in range(10):
                sync(f"layer{number}", np.ones(3))
        content = json.loads(gs.dump_flight_recorder(tmp_path).read_text())
    [(name, group)] = [(name, each) for name, each in content["groups"].items() if each["begun"]][-1:]
    group["ranks"] = [0, 1]
    for rank, begun in ((0, 2), (1, 0)):
        entries = group["entries"][:begun]
        of_rank = content | {"rank": rank, "groups": {name: group | {"begun": begun, "entries": entries}}}
        (tmp_path / f"{rank}.json").write_text(json.dumps(of_rank | {"wall_seconds": content["wall_seconds"] + 1}))
    told = CliRunner().invoke(main, ["trace", str(tmp_path)]).output.splitlines()
    assert told[0].startswith("rank 1 has not begun #1 of group ")
    assert told[0].endswith(", all_reduce(mean) float64 240 bytes [layer0, layer1, 8 more], which rank 0 has begun")
    arrays = ", ".join(f"'layer{number}': float64[3]" for number in range(8))
    assert told[1] == f"  with {arrays}, 2 more"
