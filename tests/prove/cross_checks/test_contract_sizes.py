"""The contract suite at world sizes 1 to 4, for NCCL on its stand-in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from itertools import product
from typing import Any

import pytest
from contract_places import COMMUNICATORS, Ranks

from contract_suite import PARTS

PLACES = [
    (name, world_size, kit)
    for name, runs in COMMUNICATORS.items()
    for world_size, kit in product(runs.world_sizes, runs.kits)
]


@pytest.fixture(scope="module", params=PLACES, ids=lambda place: ", ".join(map(str, place)))
def place(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A communicator, and ranks that stay for all parts."""
    name, world_size, kit = request.param
    with closing(Ranks(world_size, **COMMUNICATORS[name].options)) as ranks:
        yield name, world_size, kit, ranks


@pytest.mark.parametrize("part", PARTS)
def test_contract(place: Any, part: str) -> None:
    _, _, kit, ranks = place
    ranks.run(part, kit)  # raises where a check fails
