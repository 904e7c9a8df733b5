"""The tests that README.md beside this file names exist; `rows.py --ran` says whether they have passed."""

from __future__ import annotations

import rows


def test_each_named_test_exists() -> None:
    assert rows.missing(rows.rows((rows.TESTS / "README.md").read_text())) == []
