"""synchronized: the ranks meet after the function, where there are several."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import gradsync as gs
from places import SHM


@gs.synchronized
def halve(value: float, *, by: float = 2.0) -> float:
    """Divides."""
    return value / by


def test_the_function_stays_what_it_was() -> None:
    assert not gs.is_initialized()
    assert halve(3.0) == 1.5
    assert halve(3.0, by=3.0) == 1.0
    assert (halve.__name__, halve.__doc__) == ("halve", "Divides.")
    with pytest.raises(ZeroDivisionError):
        halve(1.0, by=0.0)


@gs.synchronized
def leave_a_file(folder: Path, rank: int) -> int:
    (folder / str(rank)).touch()
    return rank


def leave_files(comm: Any, folder: Path) -> tuple[int, list[str], str]:
    result = leave_a_file(folder, comm.rank)
    found = sorted(path.name for path in folder.iterdir())
    last = comm.recorder.last
    return result, found, last.title


def test_all_ranks_have_called_it_before_one_goes_on(tmp_path: Path) -> None:
    told = SHM.run(3, leave_files, tmp_path)
    assert told == [(rank, ["0", "1", "2"], told[0][2]) for rank in range(3)]
    assert "barrier" in told[0][2]


def raise_on_one_rank(comm: Any) -> str:
    try:
        halve(1.0, by=float(comm.rank))
    except ZeroDivisionError:
        comm.abort("there is nothing by which to divide")
        return "raised"
    except gs.RankFailed as error:
        return str(error)
    return "went on"


def test_a_rank_whose_function_raises_does_not_wait() -> None:
    first, second = SHM.run(2, raise_on_one_rank)
    assert first == "raised"
    assert "nothing by which to divide" in second
