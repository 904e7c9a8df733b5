"""The contract suite at world sizes 1 to 4, for NCCL on its stand-in; it covers what the pages say."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from itertools import product
from typing import Any

import pytest
from coverage_table import COMMUNICATORS, committed, ranks_for

from contract_suite import PARTS

PLACES = [
    (name, world_size, kit)
    for name, runs in COMMUNICATORS.items()
    for world_size, kit in product(runs.world_sizes, runs.kits)
    if name != "mpi"  # tests/prove/mpi
]


@pytest.fixture(scope="module", params=PLACES, ids=lambda place: ", ".join(map(str, place)))
def place(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A communicator, and ranks that stay for all parts."""
    name, world_size, kit = request.param
    with closing(ranks_for(world_size, COMMUNICATORS[name].options)) as ranks:
        yield name, world_size, kit, ranks


@pytest.mark.parametrize("part", PARTS)
def test_contract_covers_what_the_table_says(place: Any, part: str) -> None:
    name, world_size, kit, ranks = place
    found = ranks.run(part, kit)
    assert found == committed(name, part, world_size, kit), f"run `python tests/prove/pages/coverage_table.py {part}`"
