"""What a run has instead of an operating system, and the one list of what is exchanged for it.

The seam is the standard library, and nothing of gradsync's is named: in a simulated task `time.monotonic`,
`socket.socket`, `threading.Lock` and the rest of `System.stand_ins` mean the simulated ones, whoever calls them;
everywhere else, and in every other thread, they mean what they always do. Source that is to be simulated calls them as
attributes of their modules (`time.monotonic()`, not `from time import monotonic`). What would escape the simulation
(REFUSED) raises, and a name on the list that nobody calls any more fails a test.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any

from simulation.network import Link, Network, Weather
from simulation.scheduler import Process, Scheduler
from simulation.sockets import Poll, Selector, VirtualSocket, join
from simulation.threads import Condition, Lock, Thread

# What would wait, or tell the time, outside of the simulation. To allow one, write what stands in for it.
REFUSED = (
    *("threading.RLock", "threading._start_new_thread", "queue.SimpleQueue"),
    *("select.select", "select.epoll", "os.eventfd", "os.pipe", "os.fork"),
    *("time.perf_counter", "time.process_time", "time.monotonic_ns", "time.time_ns"),
)


class System:
    """The machines of one run, and what their kernels do.

    Args:
        seed: decides what could come one way or the other.
        weather: of the network.

    Attributes:
        processes: by pid.
        wall_clock_steps_by: how far the wall clock is wrong.
        used: the names of the list that were called.
    """

    def __init__(self, seed: int, weather: Weather) -> None:
        self.scheduler = Scheduler(seed)
        self.network = Network(self.scheduler, weather)
        self.processes: dict[int, Process] = {}
        self.wall_clock_steps_by = 0.0
        self.used: set[str] = set()
        self._real = {name: _read(name) for name in (*self.stand_ins(), *REFUSED)}

    def new_process(self, name: str, machine: str) -> Process:
        """Returns a process that does nothing yet."""
        process = Process(self.scheduler, name, 100 + len(self.processes), machine)
        self.processes[process.pid] = process
        return process

    # What goes wrong.

    def crash(self, process: Process, *, by_force: bool = False) -> None:
        """Kills a process; its kernel ends its streams, `by_force` with a reset."""
        process.is_dead = True
        for sock in list(process.sockets.values()):
            if by_force:
                sock.end("reset")
            sock.release()
        process.end()

    def vanish(self, process: Process) -> None:
        """Takes a process away with its machine: nobody hears anything of it any more."""
        self.cut(process, None)
        process.end()

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

    # The seam.

    def stand_ins(self) -> dict[str, Callable[..., Any]]:
        """Returns the list: what each name of the standard library means in a task."""
        scheduler = self.scheduler
        return {
            "time.monotonic": lambda: scheduler.now,
            "time.sleep": scheduler.sleep,
            "time.time": lambda: scheduler.now + self.wall_clock_steps_by,
            "os.getpid": lambda: scheduler.process.pid,
            "os.urandom": scheduler.choices.randbytes,
            "os.kill": self._kill,
            "os.readlink": self._readlink,
            "builtins.open": self._open,
            "socket.socket": self._socket,
            "socket.socketpair": self._socketpair,
            "socket.create_connection": self._create_connection,
            "socket.getaddrinfo": lambda host, port, **_: [
                (socket.AF_INET, socket.SOCK_STREAM, 0, "", (host.decode(), port))
            ],
            "socket.gethostname": lambda: f"host of {scheduler.process.machine}",
            "select.poll": lambda: Poll(scheduler),
            "selectors.DefaultSelector": lambda: Selector(scheduler),
            "threading.Lock": lambda: Lock(scheduler),
            "threading.Condition": lambda lock=None: Condition(scheduler, lock),
            "threading.Thread": lambda **arguments: Thread(scheduler, **arguments),
            "threading.current_thread": lambda: scheduler.current and scheduler.current.thread,
            "threading.get_ident": lambda: id(scheduler.current),
        }

    @contextlib.contextmanager
    def in_effect(self) -> Iterator[None]:
        """Exchanges the names while the block runs."""
        try:
            for name, stand_in in self.stand_ins().items():
                _write(name, self._in_tasks(name, stand_in))
            for name in REFUSED:
                _write(name, self._in_tasks(name, self._refuse(name)))
            yield
        finally:
            for name, real in self._real.items():
                _write(name, real)

    def _in_tasks(self, name: str, stand_in: Callable[..., Any]) -> Callable[..., Any]:
        real, scheduler, get_ident = self._real[name], self.scheduler, self._real["threading.get_ident"]
        this_thread = get_ident()

        def call(*args: Any, **options: Any) -> Any:
            if scheduler.current is None or get_ident() != this_thread:
                return real(*args, **options)
            self.used.add(name)
            return stand_in(*args, **options)

        return call

    @staticmethod
    def _refuse(name: str) -> Callable[..., Any]:
        def refuse(*_: Any, **__: Any) -> Any:
            raise NotImplementedError(f"the simulation has nothing that stands in for {name}: see simulation/system.py")

        return refuse

    def _kill(self, pid: int, _: int) -> None:
        process = self.processes.get(pid)
        if process is None or process.is_dead or process.machine != self.scheduler.process.machine:
            raise ProcessLookupError

    def _readlink(self, path: str) -> str:
        assert path == "/proc/self/ns/pid", path
        return "pid:[1]"

    def _open(self, path: Any, *args: Any, **options: Any) -> Any:
        """What /proc tells of the machine and of its processes; other files are real."""
        if path == "/proc/sys/kernel/random/boot_id":
            return io.StringIO(f"boot of {self.scheduler.process.machine}")
        if not isinstance(path, str) or not path.startswith("/proc/") or not path.endswith("/stat"):
            return self._real["builtins.open"](path, *args, **options)
        process = self.processes.get(int(path.split("/")[2]))
        if process is None or process.is_dead or process.machine != self.scheduler.process.machine:
            raise FileNotFoundError(path)
        return io.BytesIO(b"%d (rank) %s %s" % (process.pid, b"T" if process.is_stopped else b"S", b"1 " * 40))

    def _socket(self, *_: Any) -> VirtualSocket:
        return VirtualSocket(self.network, self.scheduler.process)

    def _socketpair(self) -> tuple[VirtualSocket, VirtualSocket]:
        one, other = self._socket(), self._socket()
        join(Link(self.scheduler, Weather(latency_seconds=0.0)), one, other)
        return one, other

    def _create_connection(self, address: tuple[bytes, int], timeout: float) -> VirtualSocket:
        stream = self._socket()
        stream.settimeout(timeout)
        try:
            stream.connect((address[0].decode(), address[1]))
        except OSError:
            stream.close()
            raise
        return stream


def _read(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def _write(name: str, value: Any) -> None:
    module, _, attribute = name.rpartition(".")
    setattr(sys.modules[module], attribute, value)
