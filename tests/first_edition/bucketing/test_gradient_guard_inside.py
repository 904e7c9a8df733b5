"""The debug mode finds who writes to a gradient that gradsync has, names it, and lets pass what is allowed."""

from __future__ import annotations

import numpy as np
import pytest

import gradsync as gs
from gradsync.bucketing import gradient_guard
from gradsync.communicators.local import local_communicator


def test_without_the_debug_mode_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_guard.GradientGuard, "take", None)
    with local_communicator() as comm:
        sync = gs.AllreduceCallback("sum", comm, lock_gradients=False)
        gradient = np.ones(3)
        with sync.backward():
            sync("p", gradient)
            gradient += 1
