"""What a look at a silent peer can find, and the sentences that say it: plain data, without I/O.

`probing` looks; the server's core and `silence` judge by what was found; both ends tell it in these words.
"""

from __future__ import annotations

import enum


class Finding(enum.Enum):
    """What a look at a silent peer has found; the value says it of the peer, in words."""

    STOPPED = "was stopped (SIGSTOP?)"
    GONE = "is gone"
    UNREACHABLE = "cannot be reached"
    RUNNING = "runs"
    UNKNOWN = "may run"

    @property
    def is_fatal(self) -> bool:
        """Whether a peer of which this is found cannot take part any more."""
        return self in (Finding.STOPPED, Finding.GONE, Finding.UNREACHABLE)

    @property
    def detail(self) -> str:
        """What stands behind it."""
        return _DETAILS[self]

    def of_lost(self, who: str, evidence: str, *, where: str = "") -> str:
        """Returns the sentence on a peer that is given up.

        Args:
            who: the peer.
            evidence: what it has missed.
            where: what the peer was in, e.g. " in phase 'train'".
        """
        return f"{who} {self.value}{where}: {self.detail}; {evidence}"

    def of_slow(self, who: str, silent_seconds: float) -> str:
        """Returns the sentence on a peer that is silent for long, although nothing is wrong with it."""
        return f"{who} has not been heard of for {silent_seconds:.0f} s, but {self.value} ({self.detail})"


_DETAILS = {
    Finding.STOPPED: "its process does not go on without SIGCONT",
    Finding.GONE: "its process has ended, though another one holds its connection open",
    Finding.UNREACHABLE: "its machine acknowledges nothing: it, or the network between, failed",
    Finding.RUNNING: "a long call that holds Python's lock?",
    Finding.UNKNOWN: "its machine is up, and its processes cannot be seen from here",
}
