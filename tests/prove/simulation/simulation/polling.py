"""What stands in for `select` and `selectors`."""

from __future__ import annotations

import select as real_select
import selectors as real_selectors
from typing import Any

from simulation.scheduler import Scheduler
from simulation.sockets import VirtualSocket

_MASKS = {
    real_selectors.EVENT_READ: real_select.POLLIN,
    real_selectors.EVENT_WRITE: real_select.POLLOUT,
    real_selectors.EVENT_READ | real_selectors.EVENT_WRITE: real_select.POLLIN | real_select.POLLOUT,
}
_READ_EVENTS = real_select.POLLIN | real_select.POLLHUP | real_select.POLLERR | real_select.POLLNVAL
_WRITE_EVENTS = real_select.POLLOUT | real_select.POLLHUP | real_select.POLLERR


class Poll:
    """A poll object of the process that makes it."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._process = scheduler.process
        self._watched: dict[int, tuple[VirtualSocket, int]] = {}

    def register(self, what: Any, mask: int) -> None:
        descriptor = what if isinstance(what, int) else what.fileno()
        self._watched[descriptor] = (self._process.sockets[descriptor], mask)

    def poll(self, milliseconds: float | None = None) -> list[tuple[int, int]]:
        if milliseconds is not None and milliseconds <= 0:
            self._scheduler.give_way()
        elif not self._is_ready():
            self._scheduler.wait(self._is_ready, None if milliseconds is None else milliseconds / 1000.0)
        return self._ready()

    def _is_ready(self) -> bool:
        return any(sock.readiness(mask) for sock, mask in self._watched.values())

    def _ready(self) -> list[tuple[int, int]]:
        found = ((descriptor, sock.readiness(mask)) for descriptor, (sock, mask) in self._watched.items())
        return [(descriptor, events) for descriptor, events in found if events]


class Select:
    """The module `select`, as far as the rendezvous uses it."""

    POLLIN, POLLOUT = real_select.POLLIN, real_select.POLLOUT

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def poll(self) -> Poll:
        return Poll(self._scheduler)


class Selector:
    """A selector."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._keys: dict[VirtualSocket, real_selectors.SelectorKey] = {}

    def register(self, what: VirtualSocket, events: int, data: Any = None) -> None:
        if what in self._keys:
            raise KeyError(f"{what!r} is registered already")
        self._keys[what] = real_selectors.SelectorKey(what, what.fileno(), events, data)  # type: ignore[arg-type]

    def unregister(self, what: VirtualSocket) -> None:
        del self._keys[what]

    def modify(self, what: VirtualSocket, events: int, data: Any = None) -> None:
        self.unregister(what)
        self.register(what, events, data)

    def select(self, seconds: float | None = None) -> list[tuple[real_selectors.SelectorKey, int]]:
        if seconds is not None and seconds <= 0:
            self._scheduler.give_way()
        elif not self._is_ready():
            self._scheduler.wait(self._is_ready, seconds)
        ready = self._ready()
        self._scheduler.choices.shuffle(ready)  # the kernel promises no order
        return ready

    def close(self) -> None:
        self._keys.clear()

    def _is_ready(self) -> bool:
        return any(what.readiness(_MASKS[key.events]) for what, key in self._keys.items())

    def _ready(self) -> list[tuple[real_selectors.SelectorKey, int]]:
        found = []
        for what, key in self._keys.items():
            events = what.readiness(_MASKS[key.events])
            if not events:
                continue
            mask = bool(events & _READ_EVENTS) * real_selectors.EVENT_READ
            mask |= bool(events & _WRITE_EVENTS) * real_selectors.EVENT_WRITE
            if mask & key.events:
                found.append((key, mask & key.events))
        return found


class Selectors:
    """The module `selectors`, likewise."""

    EVENT_READ, EVENT_WRITE = real_selectors.EVENT_READ, real_selectors.EVENT_WRITE

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def DefaultSelector(self) -> Selector:  # noqa: N802, as the module has it
        return Selector(self._scheduler)
