"""Puts the simulated clock, threads, sockets and processes under the modules of the rendezvous.

Each module has its own names for `time`, `os`, `socket` and so on: these are exchanged, and nothing else.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pkgutil
import queue
import select
import selectors
import socket
import threading
import time
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from gradsync import rendezvous
from gradsync.machine import ProcessStat
from simulation.polling import Select, Selectors
from simulation.scheduler import Process, Scheduler
from simulation.sockets import VirtualSocket, join
from simulation.streams import Link, Network, Weather
from simulation.threads import Queues, Threading


class _Others:
    """A module of which some names mean something else."""

    def __init__(self, real: ModuleType) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class Time(_Others):
    """The module `time`; the wall clock is not to be looked at: it may step at any moment."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(time)
        self._scheduler = scheduler
        self.wall_clock_reads = 0
        self.wall_clock_steps_by = 0.0

    def monotonic(self) -> float:
        return self._scheduler.now

    def sleep(self, seconds: float) -> None:
        self._scheduler.wait(lambda: False, seconds)

    def time(self) -> float:
        self.wall_clock_reads += 1
        return self._scheduler.now + self.wall_clock_steps_by


class Os(_Others):
    """The module `os`."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(os)
        self._machine = machine

    def getpid(self) -> int:
        current = self._machine.scheduler.current
        return os.getpid() if current is None else current.process.pid

    def urandom(self, size: int) -> bytes:
        return self._machine.scheduler.choices.randbytes(size)

    def kill(self, pid: int, _: int) -> None:
        process = self._machine.processes.get(pid)
        if process is None or process.is_dead:
            raise ProcessLookupError


class Sockets(_Others):
    """The module `socket`."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(socket)
        self._machine = machine

    def socket(self, *_: Any) -> VirtualSocket:
        return VirtualSocket(self._machine.network, self._machine.scheduler.process)

    def socketpair(self) -> tuple[VirtualSocket, VirtualSocket]:
        one, other = self.socket(), self.socket()
        join(Link(self._machine.scheduler, Weather(latency_seconds=0.0)), one, other)
        return one, other

    def create_connection(self, address: tuple[bytes, int], timeout: float) -> VirtualSocket:
        stream = self.socket()
        stream.settimeout(timeout)
        try:
            stream.connect((address[0].decode(), address[1]))
        except OSError:
            stream.close()
            raise
        return stream

    def getaddrinfo(self, host: bytes, port: int, **_: Any) -> list[tuple[Any, ...]]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (host.decode(), port))]

    def gethostname(self) -> str:
        return "host-of-" + self._machine.scheduler.process.machine


class Machine:
    """Everything that a run has instead of the operating system.

    Args:
        seed: decides what could come one way or the other.
        weather: of the network.

    Attributes:
        scheduler, network, processes: what there is; processes by pid.
        time: what stands in for the module of that name.
    """

    def __init__(self, seed: int, weather: Weather) -> None:
        self.scheduler = Scheduler(seed)
        self.network = Network(self.scheduler, weather)
        self.processes: dict[int, Process] = {}
        self.time = Time(self.scheduler)

    def new_process(self, name: str, machine: str) -> Process:
        """Returns a process that does nothing yet."""
        process = Process(self.scheduler, name, 100 + len(self.processes), machine)
        self.processes[process.pid] = process
        return process

    def crash(self, process: Process, *, by_force: bool = False) -> None:
        """Kills a process; its kernel ends its streams.

        Args:
            process: which.
            by_force: whether they are reset.
        """
        process.is_dead = True
        for sock in list(process.sockets.values()):
            if by_force:
                sock.end("reset")
            sock.release()
        process.kill()

    def vanish(self, process: Process) -> None:
        """Takes a process away with its machine: nobody hears anything of it any more."""
        self.cut(process, None)
        process.kill()

    def cut(self, process: Process, seconds: float | None) -> None:
        """Lets nothing through between a process and the others for so long, or for good."""
        for sock in process.sockets.values():
            if sock.link is not None:
                sock.link.cut(seconds)

    def stop(self, process: Process, seconds: float | None) -> None:
        """Stops a process, for so long or for good."""
        process.is_stopped = True
        if seconds is not None:
            self.scheduler.at(self.scheduler.now + seconds, lambda: setattr(process, "is_stopped", False))

    def reset(self, process: Process) -> None:
        """Resets a process's connections; it goes on."""
        for sock in process.sockets.values():
            if sock.link is not None:
                sock.link.reset()

    def read_stat(self, pid: int) -> ProcessStat | None:
        """What /proc would say."""
        process = self.processes.get(pid)
        if process is None or process.is_dead:
            return None
        return ProcessStat("T" if process.is_stopped else "S", 1, "0")

    def identity(self) -> str:
        """What tells whether two processes see each other."""
        return self.scheduler.process.machine

    def stand_ins(self) -> dict[Any, Any]:
        """What is exchanged in each module, by what it is."""
        from gradsync.machine import machine_identity, read_stat

        return {
            id(time): self.time,
            id(os): Os(self),
            id(socket): Sockets(self),
            id(select): Select(self.scheduler),
            id(selectors): Selectors(self.scheduler),
            id(threading): Threading(self.scheduler),
            id(queue): Queues(self.scheduler),
            id(machine_identity): self.identity,
            id(read_stat): self.read_stat,
        }


@contextlib.contextmanager
def in_place(machine: Machine) -> Iterator[None]:
    """Exchanges the names while the block runs."""
    stand_ins = machine.stand_ins()
    exchanged = []
    try:
        for module, name, real in _names():
            setattr(module, name, stand_ins[id(real)])
            exchanged.append((module, name, real))
        yield
    finally:
        for module, name, real in exchanged:
            setattr(module, name, real)


def _names() -> list[tuple[ModuleType, str, Any]]:
    """Returns where the modules of the rendezvous have a name for something of the operating system."""
    if not _found:
        from gradsync import machine
        from gradsync.machine import machine_identity, read_stat

        _found.append((machine, "threading", threading))  # of its Latch
        real = {time, os, socket, select, selectors, threading, queue, machine_identity, read_stat}
        for info in pkgutil.iter_modules(rendezvous.__path__, rendezvous.__name__ + "."):
            module = importlib.import_module(info.name)
            for name, value in vars(module).items():
                if isinstance(value, (ModuleType, type(read_stat))) and value in real:
                    _found.append((module, name, value))
    return _found


_found: list[tuple[ModuleType, str, Any]] = []
