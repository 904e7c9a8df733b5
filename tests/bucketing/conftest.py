"""Fixtures of the tests of bucketing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import gradsync as gs
from bucketing.reference import in_a_group, raise_errors


@pytest.fixture
def alone() -> Iterator[gs.Communicator]:
    """A world of one, in the process of the test."""
    with gs.init_process_group("local") as comm:
        yield comm


@pytest.fixture
def run_in_group(run_on_ranks: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """As run_on_ranks, in a group that the function may break. Any error is raised here, and costs no rank its life:

    for tests of what is not right yet, and for failures on purpose.
    """

    def run(size: int, function: Callable[..., Any], *args: Any, on: str = "shm") -> list[Any]:
        return raise_errors(run_on_ranks(size, in_a_group, function, *args, on=on))

    return run
