"""A word of 0.2 that has gone raises an error that says what to write instead."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

import gradsync as gs
from gradsync.cli import main
from gradsync.removed import REMOVED


def test_options_and_names_that_have_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    for where in ("AllreduceCallback", "an AllreduceCallback", "gradsync", "gradsync run", "gradsync (command)"):
        monkeypatch.setitem(REMOVED[where], "--old" if where == "gradsync run" else "old", "write new")
    told = r"has no (--)?old any more \(removed in 0\.3\): write new"
    with pytest.raises(gs.InvalidArgument, match=told):
        gs.AllreduceCallback("mean", old=1)  # type: ignore[arg-type]
    for owner in (gs, gs.AllreduceCallback("mean")):
        with pytest.raises(gs.InvalidArgument, match=told):
            getattr(owner, "old")  # noqa: B009
        assert not hasattr(owner, "old")
        with pytest.raises(AttributeError, match="no attribute 'never'"):
            getattr(owner, "never")  # noqa: B009
    for words in (["old"], ["run", "--old", "train.py"]):
        done = CliRunner().invoke(main, words)
        assert done.exit_code == 2
        assert "any more (removed in 0.3): write new" in done.output
