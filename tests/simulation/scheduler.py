"""One task runs at a time, the seed says which; the clock goes on only when all of them wait.

A task is a thread of a simulated process. It gives way where a thread could be made to: when it waits and, if the seed
will have it so, in any call to what stands in for the operating system. Tasks are greenlets: a switch takes less than
a microsecond, and one can be ended where it stands, as kill -9 does. (Threads that hand a lock round take 30 times as
long and cannot be ended.)
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import random
from collections.abc import Callable
from typing import Any

import greenlet

GIVE_WAY = 0.25  # of the calls that do not wait
MOST_SECONDS, MOST_TURNS = 600.0, 200_000  # far above what any seed needs: there is no end of waiting without them


class Killed(BaseException):
    """Ends a task whose process has died; whatever it still tries to do raises it again."""


class Stuck(Exception):
    """Nothing can happen any more, or too much does, and tasks have not ended."""


class Process:
    """A simulated process: its threads and its sockets.

    Attributes:
        machine: the name of the machine on which it runs.
        sockets: the open ones, by descriptor.
        slowness_seconds: how long it is kept waiting before each of its turns, at most.
    """

    def __init__(self, scheduler: Scheduler, name: str, pid: int, machine: str) -> None:
        self.name = name
        self.pid = pid
        self.machine = machine
        self.tasks: list[Task] = []
        self.sockets: dict[int, Any] = {}
        self.is_stopped = False
        self.is_dead = False
        self.slowness_seconds = 0.0
        self._scheduler = scheduler
        self._descriptors = itertools.count(3)

    def start(self, name: str, function: Callable[[], Any]) -> Task:
        """Begins a thread."""
        task = Task(self._scheduler, self, f"{self.name}.{name}", function)
        self.tasks.append(task)
        return task

    def next_descriptor(self) -> int:
        """Returns a number that no other socket of this process ever had."""
        return next(self._descriptors)

    def end(self) -> None:
        """Ends all its threads at once; what becomes of its sockets is the network's affair."""
        self.is_dead = True
        for task in self.tasks:
            task.end()
        self._scheduler.forget_ended()

    @property
    def living_tasks(self) -> list[Task]:
        """Its threads that have not ended."""
        return [task for task in self.tasks if not task.is_over]


class Task:
    """A thread of a process, and what it waits for."""

    def __init__(self, scheduler: Scheduler, process: Process, name: str, function: Callable[[], Any]) -> None:
        self.process = process
        self.name = name
        self.ready: Callable[[], Any] | None = None  # None: it only gave way
        self.deadline: float | None = None
        self.not_before = 0.0
        self.thread: Any = None  # what `threading` calls it
        self._scheduler = scheduler
        self._function = function
        self._greenlet = greenlet.greenlet(self._run, parent=scheduler.hub)
        scheduler.tasks.append(self)

    @property
    def is_over(self) -> bool:
        return bool(self._greenlet.dead)

    def may_run(self, now: float) -> bool:
        """Whether what it waits for is there, or its time is up."""
        if self.process.is_stopped or now < self.not_before:
            return False
        return self.ready is None or (self.deadline is not None and self.deadline <= now) or bool(self.ready())

    def take_turn(self) -> None:
        """Lets it run until it waits or gives way; an error that it does not catch comes out here."""
        self._greenlet.switch()

    def end(self) -> None:
        """Ends it where it stands."""
        if self.is_over:
            return
        scheduler, ender = self._scheduler, self._scheduler.current
        self._greenlet.parent = greenlet.getcurrent()  # where it goes on when this one has ended
        scheduler.current = self
        try:
            self._greenlet.throw(Killed)
        except Killed:  # it had not begun
            pass
        finally:
            scheduler.current = ender

    def _run(self) -> None:
        with contextlib.suppress(Killed):
            self._function()
        del self._function


class Scheduler:
    """The clock, the tasks and the seed's choices.

    Attributes:
        now: monotonic seconds.
        choices: the seed's.
        trace: what happened, with its time; equal for equal seeds.
        current: the task that runs.
    """

    def __init__(self, seed: int) -> None:
        self.now = 1000.0
        self.choices = random.Random(seed)
        self.trace: list[tuple[Any, ...]] = []
        self.hub = greenlet.getcurrent()
        self.current: Task | None = None
        self.tasks: list[Task] = []
        self._timers: list[tuple[float, int, Callable[[], Any]]] = []
        self._order = itertools.count()

    @property
    def process(self) -> Process:
        """The process that runs now."""
        assert self.current is not None
        return self.current.process

    def at(self, time_due: float, function: Callable[[], Any]) -> None:
        """Calls a function once the clock is there."""
        heapq.heappush(self._timers, (time_due, next(self._order), function))

    def note(self, *what: Any) -> None:
        """Adds to the trace."""
        self.trace.append((self.now, *what))

    def wait(self, ready: Callable[[], Any], seconds: float | None) -> bool:
        """Lets the running task wait; returns whether what it waits for is there."""
        task = self.current
        assert task is not None
        task.ready = ready
        task.deadline = None if seconds is None else self.now + max(seconds, 0.0)
        self._switch(task)
        return bool(ready())

    def sleep(self, seconds: float) -> None:
        self.wait(lambda: False, seconds)

    def give_way(self) -> None:
        """Lets another task run first, if the seed will have it so."""
        task = self.current
        if task is None:
            return
        if task.process.is_dead:
            raise Killed
        if self.choices.random() < GIVE_WAY:
            task.ready = task.deadline = None
            self._switch(task)

    def run(self) -> None:
        """Runs until all tasks have ended, but for those that are stopped for good.

        Raises:
            Stuck: some wait for what cannot come, or there is no end of it.
        """
        until = self.now + MOST_SECONDS
        for _ in range(MOST_TURNS):
            if self.now > until:
                raise Stuck(f"no end after {MOST_SECONDS} s: {[task.name for task in self.tasks]}")
            while self._timers and self._timers[0][0] <= self.now:
                heapq.heappop(self._timers)[2]()
            runnable = [task for task in self.tasks if task.may_run(self.now)]
            if runnable:
                self._turn(runnable[int(self.choices.random() * len(runnable))] if runnable[1:] else runnable[0])
            elif not self._skip_to_next_moment():
                break
        else:
            raise Stuck(f"no end after {MOST_TURNS} turns: {[task.name for task in self.tasks]}")
        waiting = [task.name for task in self.tasks if not task.process.is_stopped]
        if waiting:
            raise Stuck(f"nothing can happen any more, and these wait: {waiting}")

    def forget_ended(self) -> None:
        """Forgets the tasks that have ended."""
        self.tasks = [task for task in self.tasks if not task.is_over]

    def _switch(self, task: Task) -> None:
        self.hub.switch()
        if task.process.is_dead:
            raise Killed

    def _turn(self, task: Task) -> None:
        if task.process.slowness_seconds:
            task.not_before = self.now + self.choices.random() * task.process.slowness_seconds
        self.current = task
        self.trace.append((self.now, task.name))
        try:
            task.take_turn()
        finally:
            self.current = None
        if task.is_over:
            self.forget_ended()

    def _skip_to_next_moment(self) -> bool:
        """Moves the clock to the next moment at which anything can happen; returns whether there is one."""
        running = [task for task in self.tasks if not task.process.is_stopped]
        moments = [task.not_before for task in running] + [t.deadline for t in running if t.deadline is not None]
        moments += [self._timers[0][0]] if self._timers else []
        later = min((moment for moment in moments if moment > self.now), default=None)
        self.now = self.now if later is None else later
        return later is not None
