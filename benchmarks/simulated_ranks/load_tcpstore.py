"""A process that is many ranks with TCPStore's own client objects, a thread for each: their calls block.

    python -m simulated_ranks.load_tcpstore tcpstore HOST PORT WORLD_SIZE FIRST COUNT

It runs where PyTorch is installed, takes the commands of `load`; the first line is read and not needed.
"""

from __future__ import annotations

import queue
import sys
import threading
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore

from simulated_ranks.contenders import BARRIER, GET_ID, JOIN, PUT_ID, UNIQUE_ID
from simulated_ranks.reports import chosen, raise_limit, serve

_TIMEOUT = timedelta(seconds=60)
_STACK_BYTES = 256 * 1024


class Rank:
    """One rank: a client, and the thread that uses it.

    Args:
        address: of the server.
        world_size: how many ranks there are.
        done: gets None, or the error, at the end of each phase.
    """

    def __init__(self, address: tuple[str, int], world_size: int, done: queue.SimpleQueue[Exception | None]) -> None:
        self.phases: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._address = address
        self._world_size = world_size
        self._done = done
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            phase = self.phases.get()
            try:
                self._play(phase)
                self._done.put(None)
            except Exception as error:
                self._done.put(error)

    def _play(self, phase: str) -> None:
        if phase == JOIN:
            self._store = TCPStore(*self._address, is_master=False, wait_for_workers=False, timeout=_TIMEOUT)
        if phase == PUT_ID:
            self._store.set("id", UNIQUE_ID)
        elif phase == GET_ID:
            self._store.get("id")
        elif phase in (JOIN, BARRIER):  # as torch.distributed's store-based barrier does
            if self._store.add(f"{phase} count", 1) == self._world_size:
                self._store.set(f"{phase} complete", "1")
            self._store.wait([f"{phase} complete"])


def main() -> None:
    """Serves commands until the end of standard input."""
    host, port = sys.argv[2:4]
    world_size, _, count = map(int, sys.argv[4:7])
    raise_limit()
    threading.stack_size(_STACK_BYTES)
    sys.stdin.readline()
    done: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
    ranks = [Rank((host, int(port)), world_size, done) for _ in range(count)]

    def obey(word: str, rest: str) -> dict[str, Any]:
        playing = ranks[chosen(rest)]
        for rank in playing:
            rank.phases.put(word)
        for _ in playing:
            if (error := done.get()) is not None:
                raise error
        return {"lost": 0, "beats": 0}

    serve(obey)


if __name__ == "__main__":
    main()
