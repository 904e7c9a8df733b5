"""What stands in for `threading` and `queue`."""

from __future__ import annotations

import queue as real_queue
import threading as real_threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from simulation.scheduler import Scheduler, Task


class Lock:
    """A lock between the tasks of a process."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._is_held = False

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        self._scheduler.give_way()
        if self._is_held and blocking:
            self._scheduler.wait(lambda: not self._is_held, None if timeout < 0 else timeout)
        if self._is_held:
            return False
        self._is_held = True
        return True

    def release(self) -> None:
        if not self._is_held:
            raise RuntimeError("release unlocked lock")
        self._is_held = False

    def locked(self) -> bool:
        self._scheduler.give_way()
        return self._is_held

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Condition:
    """A condition on such a lock."""

    def __init__(self, scheduler: Scheduler, lock: Lock) -> None:
        self._scheduler = scheduler
        self._lock = lock
        self._waiting: list[list[bool]] = []  # one flag for each task that waits: whether it was notified

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        told = [False]
        self._waiting.append(told)
        self._lock.release()
        try:
            self._scheduler.wait(lambda: told[0], timeout)
        finally:
            if told in self._waiting:
                self._waiting.remove(told)
            self._lock.acquire()
        return told[0]

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        deadline = None if timeout is None else self._scheduler.now + timeout
        while not (result := predicate()):
            left = None if deadline is None else deadline - self._scheduler.now
            if left is not None and left <= 0:
                return result
            self.wait(left)
        return result

    def notify_all(self) -> None:
        for told in self._waiting:
            told[0] = True
        self._waiting.clear()


class Event:
    """A flag that tasks wait for."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._scheduler.give_way()
        self._is_set = True

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        if timeout is not None and timeout <= 0:
            self._scheduler.give_way()
            return self._is_set
        return self._scheduler.wait(lambda: self._is_set, timeout)


class Thread:
    """A thread of the process that makes it."""

    def __init__(
        self,
        scheduler: Scheduler,
        target: Callable[..., Any],
        args: Iterable[Any] = (),
        name: str = "thread",
        daemon: bool | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._target, self._args = target, tuple(args)
        self._name, self.daemon = name, daemon
        self._task: Task | None = None

    def start(self) -> None:
        self._task = self._scheduler.process.start(self._name, self._run)
        self._task.thread = self

    def join(self, timeout: float | None = None) -> None:
        task = self._task
        assert task is not None
        self._scheduler.wait(lambda: task.is_over, timeout)

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.is_over

    def _run(self) -> None:
        target, args = self._target, self._args
        del self._target, self._args  # as the real one: it keeps nothing alive that has ended
        target(*args)


class Queue:
    """A queue between tasks."""

    def __init__(self, scheduler: Scheduler, maxsize: int = 0) -> None:
        self._scheduler = scheduler
        self._maxsize = maxsize
        self._items: deque[Any] = deque()

    def put_nowait(self, item: Any) -> None:
        if 0 < self._maxsize <= len(self._items):
            raise real_queue.Full
        self._items.append(item)

    def get(self) -> Any:
        self._scheduler.wait(lambda: self._items, None)
        return self._items.popleft()


class Threading:
    """The module `threading`, as far as the rendezvous uses it."""

    TIMEOUT_MAX = real_threading.TIMEOUT_MAX

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def Lock(self) -> Lock:  # noqa: N802, as the module has it
        return Lock(self._scheduler)

    def Condition(self, lock: Lock) -> Condition:  # noqa: N802
        return Condition(self._scheduler, lock)

    def Event(self) -> Event:  # noqa: N802
        return Event(self._scheduler)

    def Thread(self, **arguments: Any) -> Thread:  # noqa: N802
        return Thread(self._scheduler, **arguments)

    def current_thread(self) -> Any:
        assert self._scheduler.current is not None
        return self._scheduler.current.thread

    def get_ident(self) -> int:
        return id(self._scheduler.current)


class Queues:
    """The module `queue`, likewise."""

    Full = real_queue.Full

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def Queue(self, maxsize: int = 0) -> Queue:  # noqa: N802
        return Queue(self._scheduler, maxsize)
