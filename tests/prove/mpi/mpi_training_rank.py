"""A rank that trains the digits example for a little while and tells what it has learnt, whoever has started it."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))

import gradsync as gs
from train_digits import Settings, train

with gs.init_process_group() as comm:
    result = train(comm, Settings(epochs=3, quiet=True))
    digest = hashlib.sha256(b"".join(array.tobytes() for array in result.parameters.values())).hexdigest()
    sys.stdout.write(f"{comm.backend} {digest} {result.identical} {result.accuracies[-1]:.3f}\n")
