"""Keys: the values and counters that the ranks of one generation share, with reads that wait.

Part of the server's core, without I/O, beside `places`. Each request method returns the messages to send now.
"""

from __future__ import annotations

from gradsync.rendezvous.events import Send
from gradsync.rendezvous.messages import REFUSED
from gradsync.rendezvous.roster import Roster
from gradsync.rendezvous.scopes import is_under
from gradsync.rendezvous.waiting import Request, Wait, WaitTable

MAX_STORED_BYTES = 64 * 1024**2
_MAX_COUNTER_DIGITS = 20


class KeyWaits:
    """The waits for one key that is not set; stands in `table` under that key while it has any."""

    def __init__(self, key: str, table: dict[str, KeyWaits]) -> None:
        self.waits: list[Wait] = []
        self._key = key
        self._table = table

    def withdraw(self, wait: Wait) -> None:
        """Forgets this wait."""
        self.waits.remove(wait)
        if not self.waits:
            del self._table[self._key]

    def missing_ranks(self) -> tuple[int, ...]:
        """Nobody knows which rank would have set the key."""
        return ()


class Keys:
    """Values by key, with waiting reads; counters are values that hold a decimal number."""

    def __init__(self, roster: Roster, waits: WaitTable) -> None:
        self._roster = roster
        self._waits = waits
        self._values: dict[str, bytes] = {}
        self._waiting: dict[str, KeyWaits] = {}
        self._stored_bytes = 0

    def set(self, request: Request, key: str, value: bytes) -> list[Send]:
        """Stores a value and answers those who wait for it."""
        if not self._store(key, value):
            return [request.refuse(_full(key, len(value)), REFUSED)]
        return [request.reply(), *self._answer_waiting(key)]

    def get(self, request: Request, key: str, timeout_ms: int) -> list[Send]:
        """Answers with the value, now or once it is set."""
        value = self._values.get(key)
        if value is not None:
            return [request.reply(value)]
        if self._roster.one_remains():
            return [self._fail_get(request, key)]
        place = self._waiting.setdefault(key, KeyWaits(key, self._waiting))
        place.waits.append(self._waits.add(request, timeout_ms, place))
        return []

    def add(self, request: Request, key: str, amount: int) -> list[Send]:
        """Adds to a counter, which starts at 0, and answers with its new value."""
        try:
            total = _read_counter(self._values.get(key, b"0")) + amount
        except ValueError:
            return [request.refuse(f"add needs key {key!r} to hold a decimal number, it holds other bytes")]
        if not -(2**63) <= total < 2**63:
            return [request.refuse(f"add needs counter {key!r} to stay within 64 bits, it would become {total}")]
        value = b"%d" % total
        if not self._store(key, value):
            return [request.refuse(_full(key, len(value)), REFUSED)]
        return [request.reply(total), *self._answer_waiting(key)]

    def delete(self, request: Request, key: str) -> list[Send]:
        """Removes a key and answers whether it was there."""
        return [request.reply(self.discard(key))]

    def publish(self, key: str, value: bytes) -> list[Send]:
        """Stores a value that came without a request, and answers those who wait for it; drops it for want of room."""
        return self._answer_waiting(key) if self._store(key, value) else []

    def discard(self, key: str) -> bool:
        """Removes a key; returns whether it was there."""
        value = self._values.pop(key, None)
        if value is None:
            return False
        self._stored_bytes -= len(key) + len(value)
        return True

    def forget(self, scope: str) -> None:
        """Removes the keys under a name that nobody uses any more."""
        for key in [key for key in self._values if is_under(key, scope)]:
            self.discard(key)

    def rank_left(self) -> list[Send]:
        """Fails the reads that nobody can answer any more."""
        if not self._roster.one_remains():
            return []
        sends = []
        for key, place in self._waiting.items():
            for wait in place.waits:
                self._waits.close(wait)
                sends.append(self._fail_get(wait.request, key))
        self._waiting.clear()
        return sends

    def _fail_get(self, request: Request, key: str) -> Send:
        rank = self._roster.last_to_leave()
        need = f"key {key!r} is not set, and no other rank remains to set it"
        return request.fail(self._roster.left_failure(rank, need))

    def _store(self, key: str, value: bytes) -> bool:
        old = self._values.get(key)
        growth = len(value) - len(old) if old is not None else len(key) + len(value)
        if self._stored_bytes + growth > MAX_STORED_BYTES:
            return False
        self._stored_bytes += growth
        self._values[key] = value
        return True

    def _answer_waiting(self, key: str) -> list[Send]:
        place = self._waiting.pop(key, None)
        if place is None:
            return []
        sends = []
        for wait in place.waits:
            self._waits.close(wait)
            sends.append(wait.request.reply(self._values[key]))
        return sends


def _read_counter(value: bytes) -> int:
    if len(value) > _MAX_COUNTER_DIGITS:  # int() takes long for very long texts
        raise ValueError("too long")
    return int(value)


def _full(key: str, value_bytes: int) -> str:
    return (
        f"no room for key {key!r} ({value_bytes} bytes): the rendezvous stores at most "
        f"{MAX_STORED_BYTES} bytes in one generation; delete keys that are no longer needed"
    )
