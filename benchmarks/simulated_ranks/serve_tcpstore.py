"""PyTorch's TCPStore alone in a process, with its default backend: prints its port, serves until standard input ends.

python -m simulated_ranks.serve_tcpstore WORLD_SIZE   # in an environment that has PyTorch
"""

from __future__ import annotations

import sys

from torch.distributed import TCPStore

from simulated_ranks.reports import raise_limit


def main() -> None:
    """Serves."""
    raise_limit()
    sys.stdin.readline()  # where gradsync's server reads its secret
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    print(store.port, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
