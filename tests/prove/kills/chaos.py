"""Kills ranks, launchers and grandchildren of running jobs at random moments, and looks for what is left behind.

Each round starts `gradsync run` on a script that reduces without end and leaves children of every kind behind, sends
SIGKILL, SIGTERM or SIGSTOP to a random process of it, and waits for its end. Afterwards nothing may be left: no
process, and with it none of its shared memory, which has no name; no port, no file. Run by `make soak`, and more of it
by `make prove`; a short form is a test.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[3] / "benchmarks"), str(Path(__file__).parents[2])]

from failures import leftovers
from measurement import provenance
from process_table import parent_of

RANKS = 3
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP)
VICTIMS = ("rank", "launcher", "grandchild")
MARK = "GRADSYNC_TEST_CHAOS_ROUND"
_libc = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1
GUARD = b"gradsync: guard"  # begins its command line
_TOLD_CHARACTERS = 1500
_ENDS_WITHIN_SECONDS = 20.0  # far above what any failure takes; a hang takes longer
_CHILDREN = """
import os, subprocess, sys, time
import numpy as np
subprocess.Popen(["sleep", "1000"])
subprocess.Popen(["sh", "-c", "setsid sleep 1001 & sleep 1002 &"])
if os.fork() == 0:
    os.setsid()
    time.sleep(1000)
import gradsync as gs
with gs.init_process_group(timeout_seconds=15, collective_timeout_seconds=10) as comm:
    print("address", os.environ["GRADSYNC_ADDRESS"], flush=True)
    small, large = np.ones(10, np.float32), np.ones(300_000, np.float32)
    while True:
        comm.all_reduce(small, "mean")
        comm.all_reduce(large, "mean")
        time.sleep(0.001)
"""


@dataclass(frozen=True)
class Kill:
    """One round: whom it hit, with what, when, and what was wrong afterwards."""

    victim: str
    number: int
    after_seconds: float
    faults: tuple[str, ...]

    @property
    def has_left_something(self) -> bool:
        """Whether a process, a port or a file was there afterwards."""
        return any(text.startswith(("left ", "port ", "while ")) for text in self.faults)

    def __str__(self) -> str:
        name = signal.Signals(self.number).name
        verdict = "; ".join(self.faults) or "nothing left"
        return f"{name:8s} {self.victim:11s} after {self.after_seconds:4.2f} s: {verdict}"


def roles_in_round(mark: str) -> dict[int, str]:
    """Gives what each process of a round is, by process id."""
    return _roles(leftovers.marked_processes(MARK, mark))


def _roles(pids: Iterable[int]) -> dict[int, str]:
    found = {}
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            found[pid] = _role(pid)
    return found


def _role(pid: int) -> str:
    command = command_line(pid)
    if command.startswith(GUARD):
        return "guard"
    if b"chaos_script" in command and command_line(parent_of(pid)).startswith(GUARD):
        return "rank"
    return "launcher" if b"-m\0gradsync" in command else "grandchild"


def command_line(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def run_round(generator: random.Random, victim: str, number: int) -> Kill:
    """Runs one job, hits a victim with a signal, and looks at what is left."""
    mark = f"{os.getpid()}-{generator.getrandbits(60):x}"
    # Some strike while the ranks boot or meet, most while they reduce.
    after_seconds = generator.uniform(0.0, 1.5)
    with tempfile.TemporaryDirectory(prefix="gradsync-chaos-") as folder:
        script, scratch = Path(folder) / "chaos_script.py", Path(folder) / "scratch"
        script.write_text(_CHILDREN)
        scratch.mkdir()
        before = leftovers.files_of_runs(scratch)
        with (Path(folder) / "output").open("w+") as output:
            job = subprocess.Popen(
                [sys.executable, "-m", "gradsync", "run", "-n", str(RANKS), "--grace", "2", str(script)],
                # Runs beside this one leave their files elsewhere.
                env=os.environ | {MARK: mark, "TMPDIR": str(scratch), "XDG_RUNTIME_DIR": str(scratch)},
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                preexec_fn=_end_with_parent,  # should this process be killed
            )
            try:
                time.sleep(after_seconds)
                faults = _strike(job.pid, mark, victim, number, generator)
                faults += _look_at_end(job, mark, victim, number)
            finally:
                end_all(job, MARK, mark)
            printed = Path(output.name).read_text()
            faults += leftovers.open_ports(addresses_in(printed))
        faults += [f"left {name}" for name in sorted(leftovers.files_of_runs(scratch) - before)]
        if faults:
            faults.append(f"printed was {printed[-_TOLD_CHARACTERS:]!r}")
    return Kill(victim, number, after_seconds, tuple(faults))


def end_all(job: subprocess.Popen[bytes], variable: str, mark: str) -> None:
    """Kills whatever is left of a job, the marked processes and its launcher."""
    for pid in leftovers.marked_processes(variable, mark):
        _send(pid, signal.SIGKILL)
    job.kill()
    job.wait()


def _end_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)


def _strike(launcher: int, mark: str, victim: str, number: int, generator: random.Random) -> list[str]:
    """Sends the signal to a process of the wanted kind, as soon as there is one; gives what was wrong."""
    deadline = time.monotonic() + _ENDS_WITHIN_SECONDS
    while victim != "launcher":
        candidates = sorted(pid for pid, role in roles_in_round(mark).items() if role == victim)
        if candidates:
            _send(generator.choice(candidates), number)
            return []
        if time.monotonic() > deadline:
            return [f"no {victim} came to life"]
    _send(launcher, number)
    return []


def _look_at_end(job: subprocess.Popen[bytes], mark: str, victim: str, number: int) -> list[str]:
    """Waits until the job has ended, helping where only a person could; gives what was wrong."""
    if victim == "grandchild":
        job.terminate()  # the job is none the worse for it, and would go on
    elif victim == "launcher" and number == signal.SIGSTOP:
        left = _await_end(mark, _ENDS_WITHIN_SECONDS, {job.pid})
        job.send_signal(signal.SIGCONT)
        job.terminate()  # stopped before there were ranks, it would go on
        if left:
            return [f"while the launcher was stopped, {left} ran on"]
    try:
        code = job.wait(_ENDS_WITHIN_SECONDS)
    except subprocess.TimeoutExpired:
        return [f"hangs: {roles_in_round(mark)}"]
    left = _await_end(mark, 5.0 if victim == "launcher" else 0.5)
    return ([f"left {left}"] if left else []) + (["exit code 0"] if code == 0 else [])


def _await_end(mark: str, seconds: float, spared: Collection[int] = ()) -> list[str]:
    """Waits until the processes of a round, but for the spared ones, have ended; gives those that have not."""
    _, left = leftovers.await_end(MARK, mark, seconds, spared)
    return [f"{role} {pid}" for pid, role in _roles(left).items()]


def addresses_in(output: str) -> set[str]:
    """Gives the rendezvous' addresses that ranks have printed."""
    return {line.split()[-1] for line in output.splitlines() if " address " in line}


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def rounds(seed: int, count: int, at_a_time: int) -> Generator[Kill, None, None]:
    """Runs so many rounds, some at a time, for they mostly wait; a seed strikes the same at whatever pace."""

    def one(number: int) -> Kill:
        generator = random.Random(f"{seed} {number}")
        return run_round(generator, generator.choice(VICTIMS), generator.choice(SIGNALS))

    pool = ThreadPoolExecutor(at_a_time)
    try:
        yield from pool.map(one, range(count))
    finally:
        pool.shutdown(cancel_futures=True)


def as_json(kills: Sequence[Kill], seed: int, made: dict[str, Any]) -> str:
    """Gives what was struck how often, and what was left."""
    counts = Counter(f"{signal.Signals(kill.number).name} {kill.victim}" for kill in kills)
    found = [{"round": number, **asdict(kill)} for number, kill in enumerate(kills) if kill.faults]
    summary = {
        "kills": len(kills),
        "left_something_behind": sum(kill.has_left_something for kill in kills),
        "otherwise_wrong": sum(bool(kill.faults) and not kill.has_left_something for kill in kills),
        "by_kind": dict(sorted(counts.items())),
    }
    checked = [
        "processes of the run: ranks, guards, the launcher, grandchildren, double-forked ones and other sessions too",
        "shared memory: it has no name, and ends with the last of those processes",
        "ports",
        "files, also under /dev/shm",
    ]
    return json.dumps({**made, "seed": seed, "summary": summary, "checked": checked, "faulty": found}, indent=1) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=math.inf, help="after which no more rounds are begun")
    parser.add_argument("--at-a-time", type=int, default=1, help="rounds that run at once [1]")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--json", type=Path, help="where the result goes")
    options = parser.parse_args()
    made = provenance("tests/prove/kills/chaos.py")
    kills = []
    end = time.monotonic() + options.seconds
    with contextlib.closing(rounds(options.seed, options.rounds, options.at_a_time)) as all_rounds:
        for kill in all_rounds:
            kills.append(kill)
            print(f"{len(kills):4d}/{options.rounds}  {kill}", flush=True)
            if time.monotonic() > end:
                break
    faulty = sum(bool(kill.faults) for kill in kills)
    left = sum(kill.has_left_something for kill in kills)
    print(f"seed {options.seed}: {len(kills)} kills, {left} of which left a process, a port or a file behind")
    print(f"{faulty - left} were otherwise wrong")
    if options.json is not None:
        options.json.write_text(as_json(kills, options.seed, made))
    return 1 if faulty else 0


if __name__ == "__main__":
    sys.exit(main())
