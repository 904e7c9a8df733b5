"""The page on scaling is what its generator writes, and its benchmark's results are summed up as they should be."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gradsync.rendezvous.silence import heartbeat_seconds

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import rendezvous_scale
import scaling_page
import timing_tables
from gradsync.bench.rendezvous.contenders import GRADSYNC, LEAVE, PHASES, TCPSTORE
from gradsync.bench.rendezvous.run import Phase, Run
from gradsync.bench.rendezvous.tcpstore_rank import TCPStoreRank


def test_the_page_is_up_to_date() -> None:
    assert scaling_page.PAGE.read_text() == scaling_page.render(scaling_page.PAGE.read_text())


def test_every_table_has_lines_of_one_width() -> None:
    for table in scaling_page.TABLES.values():
        assert len({line.count("|") for line in table()}) == 1


def run_of(seconds: float, *, ours: bool, beats: int = 0) -> Run:
    phases = [*PHASES, LEAVE] if ours else [*PHASES]
    run = Run({phase: Phase(seconds, seconds / 2, seconds / 4) for phase in phases}, memory_growth_bytes=3_000_000)
    run.heartbeats, run.heartbeat_seconds, run.heartbeat_cpu_seconds = beats, 20.0, 0.5
    return run


@pytest.fixture
def results():
    ours = rendezvous_scale.result(
        GRADSYNC, 1024, [run_of(0.1, ours=True, beats=100), run_of(0.3, ours=True, beats=100)]
    )
    theirs = rendezvous_scale.result(TCPSTORE, 1024, [run_of(0.1, ours=False), run_of(0.1, ours=False)])
    return [ours, theirs]


def test_results_are_medians_over_runs(results) -> None:
    ours, theirs = results
    assert ours["together"]["wall_seconds"]["median"] == pytest.approx(4 * 0.2)
    assert ours["together"]["server_cpu_seconds"]["median"] == pytest.approx(4 * 0.1)
    assert ours["heartbeats"]["share_of_a_core"]["median"] == pytest.approx(0.025)
    assert ours["heartbeats"]["interval_seconds"] == heartbeat_seconds(1024)
    assert (theirs["heartbeats"], LEAVE in theirs["phases"]) == (None, False)


def test_promises(results) -> None:
    kept = {promise["what"]: promise["kept"] for promise in rendezvous_scale.promises(results)}
    assert list(kept.values()) == [True] * 4
    results[0]["lost_connections"] = 1
    results[0]["heartbeats"]["share_of_a_core"]["median"] = 0.06
    broken = [promise["what"] for promise in rendezvous_scale.promises(results) if not promise["kept"]]
    assert broken == ["heartbeats: share of a core", "connections lost"]


def test_the_table_has_a_column_for_each_server(results) -> None:
    lines = timing_tables.rendezvous_scale({"results": results})
    assert lines[0] == "| ranks | | gradsync | TCPStore |"
    assert "| 1,024 | share an id | 400 ms (200 ms) | 200 ms (100 ms) |" in lines
    assert "| 1,024 | memory of the server | + 3.0 MB | + 3.0 MB |" in lines
    assert lines[-1] == "| 1,024 | heartbeats | 2.5 % of a core | none |"


def test_contenders_take_turns(monkeypatch) -> None:
    turns = []

    def play(contender: str, ranks: int, *, beat_seconds: float) -> Run:
        turns.append((contender, beat_seconds))
        return Run()

    monkeypatch.setattr(rendezvous_scale, "play", play)
    runs = rendezvous_scale.measure([GRADSYNC, TCPSTORE], 8, 2, 5.0)
    assert turns == [
        (TCPSTORE, 0.0),
        (GRADSYNC, 0.0),
        (GRADSYNC, 5.0),
        (TCPSTORE, 0.0),
        (TCPSTORE, 0.0),
        (GRADSYNC, 5.0),
    ]
    assert [len(of_contender) for of_contender in runs.values()] == [2, 2]


def test_a_simulated_rank_of_tcpstore_speaks_its_format() -> None:
    last = TCPStoreRank(1, 2)
    assert last.begin("join") == bytes.fromhex("00 ce f7 85 3c 0d 01 00 00 00")
    assert last.hear(b"\1\0") == b""
    added = last.hear(b"\0\0")
    assert added == b"\4" + (11).to_bytes(8, "little") + b"/join count" + (1).to_bytes(8, "little")
    answer = last.hear((2).to_bytes(8, "little"))
    key = (14).to_bytes(8, "little") + b"/join complete"
    assert answer == b"\1" + key + (1).to_bytes(8, "little") + b"1" + b"\6" + (1).to_bytes(8, "little") + key
    assert not last.is_done
    assert last.hear(b"\0") == b""
    assert last.is_done
