"""Tests of private names, until the rooms that they are of are rebuilt. They use what the other tests use."""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
SHARED = ["prove/tools", "bucketing", "communicators", "launching", "rendezvous"]
sys.path[1:1] = [str(TESTS / folder) for folder in [*SHARED, "first_edition/rendezvous"]]
