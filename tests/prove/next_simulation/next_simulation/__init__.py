"""The next rendezvous in the simulation: what differs from `simulation`, whose clock, network and threads it takes."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "simulation"))
