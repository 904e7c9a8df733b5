"""Names that belong together."""

from __future__ import annotations

import pytest

from gradsync.rendezvous.scopes import is_under


@pytest.mark.parametrize("name", ["world/0,2#1", "world/0,2#1/ids", "world/0,2#1/ids/0", "world/0,2#1/"])
def test_what_a_group_has_made_is_under_its_name(name: str) -> None:
    assert is_under(name, "world/0,2#1")


@pytest.mark.parametrize("name", ["world", "world/0,2", "world/0,2#10", "world/0,2#12/ids", "a/world/0,2#1", "ids", ""])
def test_what_only_looks_like_it_is_not(name: str) -> None:
    assert not is_under(name, "world/0,2#1")
