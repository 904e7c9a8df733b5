"""The next server alone in a process: prints its port, serves until standard input ends.

python -m simulated_ranks.serve_next_gradsync WORLD_SIZE   # the secret's hex digits on the first line
"""

from __future__ import annotations

import sys
import threading

from gradsync._next.rendezvous.server import RendezvousServer


def main() -> None:
    """Serves."""
    secret = bytes.fromhex(sys.stdin.readline().strip())
    server = RendezvousServer(int(sys.argv[1]), secret=secret)
    print(server.address.rpartition(":")[2], flush=True)

    def stop() -> None:
        sys.stdin.read()
        server.stop()

    threading.Thread(target=stop, daemon=True).start()
    server.serve_forever()


if __name__ == "__main__":
    main()
