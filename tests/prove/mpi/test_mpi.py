"""The communicator over MPI, on ranks that mpiexec starts: what goes wrong ends in time, and says why."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest
from cross_check_launch import Mpi

from contract import seconds_waited
from gradsync.machine import read_stat

SCENES = str(Path(__file__).parent / "mpi_scenes.py")
SOON_SECONDS = 20.0  # what would end a wait otherwise, comes after twice that


def play(mpi: Mpi, tmp_path: Path, scene: str, *options: str, world_size: int = 2, fails: bool = False) -> str:
    """Runs a scene; a job that fails must do so."""
    codes = range(1, 256) if fails else (0,)
    try:
        return mpi.run_script(world_size, tmp_path, SCENES, scene, *options, codes=codes)
    finally:
        for pid in re.findall(r"^pid (\d+)$", (tmp_path / "log").read_text(), re.MULTILINE):
            assert_gone(int(pid))


def assert_gone(pid: int) -> None:
    """Waits for what mpiexec has killed to be gone; what stays is ended here, and counts as left behind."""
    deadline = time.monotonic() + 10.0
    while (found := read_stat(pid)) is not None and found.state != "Z":
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            raise AssertionError(f"process {pid} was left behind")
        time.sleep(0.02)


def seconds_of(rank: int, told: str) -> float:
    found = re.search(rf"rank {rank} after (\S+) s", told)
    assert found is not None, told
    return float(found[1])


def test_an_exception_ends_the_job_with_its_traceback(mpich: Mpi, tmp_path: Path) -> None:
    told = play(mpich, tmp_path, "raises", fails=True)
    assert "ValueError: wrong shapes in layer 3" in told
    assert 'raise ValueError("wrong shapes in layer 3")' in told


def test_an_exception_ends_the_job_on_open_mpi(open_mpi: Mpi, tmp_path: Path) -> None:
    assert "ValueError: wrong shapes in layer 3" in play(open_mpi, tmp_path, "raises", fails=True)


def test_a_request_of_objects_that_fails(mpich: Mpi, tmp_path: Path) -> None:
    assert "MpiError, buffers kept: True" in play(mpich, tmp_path, "a_request_of_objects_fails", fails=True)


def test_a_rank_that_exits_is_named(mpich: Mpi, tmp_path: Path) -> None:
    told = play(mpich, tmp_path, "exits", fails=True)
    assert "RankFailed: rank 0/2: rank 1 closed the communicator while this rank still needed it" in told


def test_a_stopped_rank_is_named(mpich: Mpi, tmp_path: Path) -> None:
    told = play(mpich, tmp_path, "is_stopped", fails=True)
    assert re.search(r"RankFailed: rank 0/2: rank 1/2 \(pid \d+\) was stopped \(SIGSTOP\?\)", told)
    assert seconds_of(0, told) < SOON_SECONDS


def test_a_rank_that_stays_away_is_named_at_the_deadline(mpich: Mpi, tmp_path: Path) -> None:
    told = play(mpich, tmp_path, "stays_away", "1.5", fails=True)
    assert re.search(r"CollectiveTimeout: rank 0/2: rank 0 waited \S+ s in all_reduce\(sum\) #21 .* for rank 1", told)
    assert 1.5 <= seconds_waited(told) < SOON_SECONDS
    assert "time.sleep(LONG_SECONDS)" in told  # its stack is told too
    assert seconds_of(0, told) < SOON_SECONDS


def test_a_rank_that_closes_is_named(mpich: Mpi, tmp_path: Path) -> None:
    told = play(mpich, tmp_path, "closes", fails=True)
    assert "RankFailed: rank 0/2: rank 1 closed the communicator" in told
    assert seconds_of(0, told) < SOON_SECONDS


def test_what_ctrl_c_cuts_off_beside_a_wait_is_kept(mpich: Mpi, tmp_path: Path) -> None:
    told = play(mpich, tmp_path, "is_interrupted_while_it_reduces", fails=True)
    assert "KeyboardInterrupt, to be ended by MPI_Abort: True" in told


def test_a_rank_that_is_late_for_a_group_is_not_waited_for(mpich: Mpi, tmp_path: Path) -> None:
    told = play(mpich, tmp_path, "one_is_late_for_a_group", "1", fails=True)
    assert "CollectiveTimeout, to be ended by MPI_Abort: True" in told
    assert "BAD TERMINATION" not in told  # by SIGSEGV, in MPI_Finalize


def test_a_child_of_a_fork_that_fails_ends_alone(mpich: Mpi, tmp_path: Path) -> None:
    assert play(mpich, tmp_path, "a_child_of_a_fork_fails").count("went on") == 2


def test_a_child_of_a_fork_that_fails_ends_alone_on_open_mpi(open_mpi: Mpi, tmp_path: Path) -> None:
    assert play(open_mpi, tmp_path, "a_child_of_a_fork_fails").count("went on") == 2


def test_an_abort_reaches_the_others(mpich: Mpi, tmp_path: Path) -> None:
    told = play(mpich, tmp_path, "aborts", fails=True)
    assert re.search(r"RankFailed: rank 0/2: rank 1/2 .*: I have seen enough", told)
    assert "During handling" not in told
    assert seconds_of(0, told) < SOON_SECONDS


def test_ranks_that_disagree_are_told_and_go_on(mpich: Mpi, tmp_path: Path) -> None:
    told = play(mpich, tmp_path, "answers_other_ranks_differently")
    assert told.count("went on") == 2
    mismatches = [line for line in told.splitlines() if re.match(r"\d: \{", line)]
    assert len(mismatches) == 2 * 4
    for rank in "01":
        of_rank = [line[3:] for line in mismatches if line.startswith(rank)]
        assert of_rank[1].count("message of float64[1000] (rank 0 to rank 1)") == 1


def test_ranks_that_both_send_first_are_told_and_end_at_the_deadline(mpich: Mpi, tmp_path: Path) -> None:
    told = play(mpich, tmp_path, "sends_to_the_other_first", "2.0", fails=True)
    lines = Path(SCENES).read_text().splitlines()
    for rank in range(2):
        line = 1 + lines.index(f"        comm.send(array, {1 - rank})  # the line of rank {rank}")
        message = rf"message\(rank {rank} to rank {1 - rank}\) after #\d+ \(.*, at \S*:{line} in .*?\)"
        assert re.search(rf"rank {rank} has waited \S+ s in {message} for rank {1 - rank}", told)
        assert re.search(rf"CollectiveTimeout: rank {rank}/2: rank [01] waited \S+ s in message", told)
        assert seconds_of(rank, told) < SOON_SECONDS


def test_a_rank_in_a_collective_refuses_the_messages_of_others(mpich: Mpi, tmp_path: Path) -> None:
    told = play(mpich, tmp_path, "one_of_an_exchange_is_refused", world_size=3)
    assert told.count("went on") == 3
    assert "nobody told" not in told


def test_messages_that_follow_a_collective_at_once_are_not_refused(mpich: Mpi, tmp_path: Path) -> None:
    assert play(mpich, tmp_path, "a_message_follows_a_collective_at_once").count("went on") == 2


def test_each_half_of_an_exchange_that_does_not_fit_is_described_as_what_it_is(mpich: Mpi, tmp_path: Path) -> None:
    told = play(mpich, tmp_path, "neither_half_of_an_exchange_fits")
    assert told.count("went on") == 2
    assert "nobody told" not in told


def test_the_first_difference_is_named_in_a_large_bucket(mpich: Mpi, tmp_path: Path) -> None:
    told = play(mpich, tmp_path, "gradients_differ_late_in_a_bucket")
    assert told.count("first difference, line 4991:") == 2


@pytest.mark.parametrize("ranks", [2, 3])
def test_small_arrays_travel_with_the_agreement(mpich: Mpi, tmp_path: Path, ranks: int) -> None:
    told = mpich.run_script(ranks, tmp_path, SCENES, "small_arrays_travel_with_the_agreement")
    assert told.count("went on") == ranks


def test_memory_of_a_collective_that_was_given_up_stays(mpich: Mpi, tmp_path: Path) -> None:
    told = play(mpich, tmp_path, "memory_of_what_was_given_up_stays", "1.5", fails=True)
    assert "and its memory stays: True" in told


def test_ranks_meet_over_mpi_whatever_secret_they_have(mpich: Mpi, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_text("5a" * 1000)
    more = {"GRADSYNC_SECRET_FILE": str(secret)}
    assert mpich.run_script(2, tmp_path, SCENES, "generations_follow", more=more).count("went on") == 2


@pytest.mark.parametrize(
    "scene", ["threads_use_groups_of_their_own", "groups_come_and_go", "generations_follow", "backends_by_turns"]
)
def test_ranks_of_mpi_do(mpich: Mpi, tmp_path: Path, scene: str) -> None:
    assert play(mpich, tmp_path, scene).count("went on") == 2
