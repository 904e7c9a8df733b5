"""What is forgotten is raised once, and errors that a prompt has shown do not hide it."""

from __future__ import annotations

import sys

import numpy as np
import pytest

import gradsync as gs
from gradsync.bucketing import forgotten
from gradsync.communicators.local import local_communicator
from gradsync.errors import uncaught_error


def test_an_error_that_a_prompt_has_shown_has_not_ended_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    error = KeyError("lost")
    monkeypatch.setattr(sys, "last_value", error, raising=False)
    assert uncaught_error() is error
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    assert uncaught_error() is None


def test_it_is_raised_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forgotten, "_watched", {})
    callback = gs.AllreduceCallback("mean", local_communicator())
    callback("weights", np.ones(3))
    forgotten.raise_forgotten()  # its communicator is open: it may yet be flushed
    with pytest.raises(gs.InvalidArgument, match="never reduced"):
        forgotten.raise_forgotten(everywhere=True)
    forgotten.raise_forgotten(everywhere=True)
