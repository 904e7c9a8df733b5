"""A process that is many ranks of one contender, see `reports` and `crowd`.

    python -m simulated_ranks.load CONTENDER HOST PORT WORLD_SIZE FIRST COUNT

The secret's hex digits are the first line of its input.
"""

from __future__ import annotations

import gc
import sys
from typing import Any

from simulated_ranks.contenders import GRADSYNC, LEAVE, SimulatedRank
from simulated_ranks.crowd import Crowd
from simulated_ranks.gradsync_rank import GradsyncRank
from simulated_ranks.reports import chosen, raise_limit, serve
from simulated_ranks.tcpstore_rank import TCPStoreRank


def make(contender: str, rank: int, world_size: int, secret: bytes) -> SimulatedRank:
    """Returns one rank."""
    return GradsyncRank(rank, world_size, secret) if contender == GRADSYNC else TCPStoreRank(rank, world_size)


def obey(crowd: Crowd, word: str, rest: str) -> dict[str, Any]:
    """Carries out one command and reports on it."""
    beats = 0
    if word == "beat":
        seconds, interval_seconds = map(float, rest.split())
        beats = crowd.beat(seconds, interval_seconds)
    elif word == LEAVE:
        crowd.leave(word)
    else:
        crowd.play(word, chosen(rest))
    return {"lost": crowd.lost, "beats": beats}


def main() -> None:
    """Serves commands until the end of standard input."""
    contender, host, port = sys.argv[1:4]
    world_size, first, count = map(int, sys.argv[4:7])
    raise_limit()
    gc.disable()  # a real rank is one of many processes; a collection here would stop a thousand at once
    secret = bytes.fromhex(sys.stdin.readline().strip())
    crowd = Crowd([make(contender, first + n, world_size, secret) for n in range(count)], (host, int(port)))
    serve(lambda word, rest: obey(crowd, word, rest))
    crowd.close()


if __name__ == "__main__":
    main()
