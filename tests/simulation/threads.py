"""What stands in for the primitives of `threading`. What is made of them there (Event, queue.Queue) works as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from simulation.scheduler import Killed, Scheduler, Task


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

    def take_back(self) -> None:
        """Acquires it also for a task that is being killed, which still releases it."""
        try:
            self.acquire()
        except Killed:
            self._is_held = True
            raise

    def release(self) -> None:
        if not self._is_held:
            raise RuntimeError("release unlocked lock")
        self._is_held = False

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Condition:
    """A condition on such a lock."""

    def __init__(self, scheduler: Scheduler, lock: Lock | None = None) -> None:
        self._scheduler = scheduler
        self._lock = Lock(scheduler) if lock is None else lock
        self._waiting: list[list[bool]] = []  # one flag for each task that waits: whether it was notified
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        notified = [False]
        self._waiting.append(notified)
        self._lock.release()
        try:
            self._scheduler.wait(lambda: notified[0], timeout)
        finally:
            if notified in self._waiting:
                self._waiting.remove(notified)
            self._lock.take_back()
        return notified[0]

    def notify(self, count: int = 1) -> None:
        for notified in self._waiting[:count]:
            notified[0] = True
        del self._waiting[:count]

    def notify_all(self) -> None:
        self.notify(len(self._waiting))


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
        self.name, self.daemon = name, daemon
        self._task: Task | None = None

    def start(self) -> None:
        self._task = self._scheduler.process.start(self.name, self._run)
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
