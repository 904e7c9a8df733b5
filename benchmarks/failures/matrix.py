"""The fault matrix: each fault in each phase of a run to each victim, and the expected reports.

A cell is a `Row` of three ranks; `in_phases` is what the ranks run. Impossible combinations are no cells, and `why_not`
says why. Targets are those of one host.
"""

from __future__ import annotations

import itertools
import re
import signal
from dataclasses import dataclass

from failures import runs
from failures.observation import Row
from failures.points import (
    AUTH,
    CLOSE,
    EXIT_0,
    EXIT_3,
    FAULTS,
    HALF_OPEN,
    HELLO,
    JOINED,
    KILL,
    LAUNCHER,
    PHASES,
    RAISE,
    SPAWN,
    STOP,
    TEARDOWN,
)
from failures.scene import Scene

RANKS = 3
VICTIMS = (*map(str, range(RANKS)), LAUNCHER)
_BEFORE_JOINING = (SPAWN, HELLO, AUTH)
_MEETING_SECONDS = 2.0  # the ranks' deadline, if a cell waits for it
_WITHOUT_END_SECONDS = 30.0
_GRACE_SECONDS = 2.0  # how long a rank waits for the server's answer after its deadline, as the answer says more
_FEW_STEPS = 4
_STOPPED_SECONDS = 3.0
_STANDS_STILL = r"^gradsync: rank {}/3 \(pid \d+\) was stopped"
_HALF_OPEN_SECONDS = 3.5  # a heartbeat more than on one host, where no connection is half-open; the contract gives two


@dataclass(frozen=True)
class Cell:
    """A fault at a phase to a victim: a rank's number, or the launcher, which hosts the rendezvous."""

    phase: str
    fault: str
    victim: str

    @property
    def name(self) -> str:
        return f"{self.fault} @ {self.phase} @ {self.victim}"

    @property
    def is_early(self) -> bool:
        """Whether the server does not know the victim yet."""
        return self.phase in _BEFORE_JOINING


def cells() -> list[Cell]:
    """Returns all cells, with the impossible ones."""
    return [Cell(*each) for each in itertools.product(PHASES, FAULTS, VICTIMS)]


def why_not(cell: Cell) -> str | None:
    """Returns why a cell is impossible, or None."""
    if cell.victim == LAUNCHER and cell.fault in (RAISE, EXIT_0, EXIT_3):
        return "the launcher runs no code of the user's that could raise or exit; its own end is the kill"
    if cell.fault == CLOSE and cell.phase == SPAWN:
        return "there is no control connection yet"
    return None


def row_of(cell: Cell) -> Row:
    """Returns a cell's row: its fault and the expected reports."""
    return _row_of_launcher(cell) if cell.victim == LAUNCHER else _row_of_rank(cell)


# -- A rank is the victim ------------------------------------------------------------------------------------------


def _row_of_rank(cell: Cell) -> Row:
    if cell.phase == TEARDOWN:
        return _leaving(cell)
    if not cell.is_early:
        return _missed_by_others(cell)
    if cell.fault == CLOSE:
        return _row(cell, steps=_FEW_STEPS, ends_run=False, exit_codes={runs.LAUNCHER: 0})  # it connects again
    if cell.fault in (EXIT_0, STOP):
        return _told_by_server(cell)
    return _never_joins(cell) if cell.fault == HALF_OPEN else _told_by_its_end(cell)


def _missed_by_others(cell: Cell) -> Row:
    """The others have met the victim, and learn of it from the server."""
    victim = int(cell.victim)
    others = _others(victim, but_one=cell.phase == JOINED)
    is_told_too = cell.fault == CLOSE  # it runs, and has lost the server
    return _row(
        cell,
        # The kernel keeps a connection while a thread polls it, whoever has closed its descriptor: half a second.
        all_raise=not is_told_too,
        raising=(*others, victim) if is_told_too else others,
        errors=("RankFailed", "RendezvousError") if is_told_too else ("RankFailed",),
        names=rf"\brank {victim}\b",
        culprit=victim,
        report=_report_of(cell),
        exit_codes={runs.LAUNCHER: _exit_code(cell.fault)},
        told_within={RAISE: 0.3, STOP: _STOPPED_SECONDS, HALF_OPEN: _HALF_OPEN_SECONDS}.get(cell.fault, 0.5),
    )


def _told_by_its_end(cell: Cell) -> Row:
    """The launcher sees the victim end before other ranks have met it."""
    return _row(
        cell,
        culprit=int(cell.victim),
        report=_report_of(cell),
        exit_codes={runs.LAUNCHER: _exit_code(cell.fault)},
        told_within=0.2,
        down_within=1.0,
    )


def _told_by_server(cell: Cell) -> Row:
    """The launcher reports the victim's end to the server, and the server to the ranks that wait for it."""
    return _row(
        cell,
        raising=_others(int(cell.victim)),
        errors=("RankFailed",),
        names=rf"\brank {cell.victim}\b",
        culprit=int(cell.victim),
        report=_report_of(cell),
        exit_codes={runs.LAUNCHER: 1},
        begins_with_waiting=True,
        told_within=_STOPPED_SECONDS if cell.fault == STOP else 0.5,
    )


def _never_joins(cell: Cell) -> Row:
    """Only the deadline of the rendezvous shows the others that the victim does not join."""
    victim = int(cell.victim)
    others = _others(victim)
    return _row(
        cell,
        meeting_seconds=_MEETING_SECONDS,
        raising=(*others, victim),
        all_raise=False,  # the rank with the first deadline ends the run
        errors=("RendezvousTimeout",),
        names=rf"\brank {victim}\b",
        report=(rf"RendezvousTimeout: .*\brank {victim}\b",),
        exit_codes={runs.LAUNCHER: 1},
        begins_with_waiting=True,
        told_within=_MEETING_SECONDS + 0.1,
    )


def _leaving(cell: Cell) -> Row:
    """All work is done: the launcher reports a failed end; the other ranks do not notice it."""
    if cell.fault == STOP:
        return _row(
            cell,
            report=(_STANDS_STILL.format(cell.victim),),
            exit_codes={runs.LAUNCHER: 128 + signal.SIGTERM},  # it waits for a SIGCONT
            ends_run=False,
            told_within=_STOPPED_SECONDS,
        )
    code = {CLOSE: 0, HALF_OPEN: 0, EXIT_0: 0}.get(cell.fault, _exit_code(cell.fault))
    return _row(
        cell,
        culprit=int(cell.victim),
        report=_report_of(cell) if code else (),
        exit_codes={runs.LAUNCHER: code},
        told_within=0.3 if cell.fault == RAISE else 0.5,
    )


def _report_of(cell: Cell) -> tuple[str, ...]:
    rank = rf"^gradsync: rank {cell.victim} \(pid \d+ on .*\)"
    because = rf"^gradsync: rank \d \(pid \d+ on .*\) failed with exit code 1, because of rank {cell.victim}:"
    return {
        KILL: (rf"{rank} was killed by SIGKILL",),
        RAISE: (rf"{rank} failed with exit code 1", "^ValueError: no such batch"),
        EXIT_3: (rf"{rank} failed with exit code 3",),
        EXIT_0: (rf"^gradsync: rank {cell.victim} \(pid \d+\) ended with exit code 0 before this failure", because),
        STOP: (because,),
        CLOSE: (rf"{rank} failed with exit code 1|{because}",),
        HALF_OPEN: (rf"{rank} failed with exit code 1|{because}",),
    }[cell.fault]


def _exit_code(fault: str) -> int:
    return {KILL: 128 + signal.SIGKILL, EXIT_3: 3}.get(fault, 1)


def _others(victim: int, *, but_one: bool = False) -> tuple[int, ...]:
    """Returns the other ranks, without the last one if that never joins."""
    others = [rank for rank in range(RANKS) if rank != victim]
    return tuple(others[:-1] if but_one else others)


# -- The launcher is the victim ------------------------------------------------------------------------------------


def _row_of_launcher(cell: Cell) -> Row:
    if cell.fault == KILL:
        return _row(cell, exit_codes={runs.LAUNCHER: -signal.SIGKILL}, down_within=1.0)
    if cell.phase == TEARDOWN or (cell.fault == CLOSE and cell.is_early):  # no rank needs it, or all connect again
        return _row(cell, steps=_FEW_STEPS, ends_run=False, exit_codes={runs.LAUNCHER: 0})
    if cell.phase in (SPAWN, HELLO):
        return _never_reached(cell)
    # Ranks are lost one after the other: a rank may get a report of the first loss.
    errors = ("RendezvousError",) if cell.fault == STOP else ("RendezvousError", "RankFailed")
    return _row(
        cell,
        meeting_seconds=2 * _MEETING_SECONDS,  # for the rank that joins late, when the server is gone
        raising=_raising_without_launcher(cell),
        errors=errors,
        all_raise=cell.fault != HALF_OPEN,  # the first rank that notices it ends the run
        names=r"rendezvous server|control connection|cannot be reached",
        report=("|".join(f"{error}: " for error in errors),) if cell.fault != STOP else (),
        exit_codes={runs.LAUNCHER: 1},
        told_within={STOP: _STOPPED_SECONDS, HALF_OPEN: _HALF_OPEN_SECONDS}.get(cell.fault, 0.5),
    )


def _raising_without_launcher(cell: Cell) -> tuple[int, ...]:
    """Returns the ranks that must get an error: not the late one, which joins a server that is cut off."""
    if cell.phase != JOINED:
        return tuple(range(RANKS))
    return () if cell.fault == HALF_OPEN else tuple(range(RANKS - 1))


def _never_reached(cell: Cell) -> Row:
    return _row(
        cell,
        meeting_seconds=_MEETING_SECONDS,
        raising=tuple(range(RANKS)),
        all_raise=False,
        errors=("RendezvousTimeout",),
        names="rendezvous server",
        exit_codes={runs.LAUNCHER: 1},
        begins_with_waiting=True,
        told_within=_MEETING_SECONDS + _GRACE_SECONDS + 0.1,
    )


# -- Causing a fault ---------------------------------------------------------------------------------------


def _row(
    cell: Cell, *, meeting_seconds: float = _WITHOUT_END_SECONDS, steps: int | None = None, **wanted: object
) -> Row:
    """Makes the row of a cell."""

    def play(scene: Scene) -> None:
        options = ["--timeout", str(meeting_seconds), *([] if steps is None else ["--steps", str(steps)])]
        command = ["-m", "gradsync", "run", "-n", str(RANKS), "--backend", "shm", "-m", "failures.in_phases"]
        scene.start(runs.LAUNCHER, [*command, cell.phase, cell.fault, cell.victim, *options])
        scene.wait_for_ranks(RANKS)
        _strike(scene, cell)
        if cell.phase == TEARDOWN and cell.fault == STOP and cell.victim != LAUNCHER:
            told = re.compile(_STANDS_STILL.format(cell.victim))
            scene.wait_until(lambda: any(told.search(line.text) for line in scene.lines), "word of the stopped rank")
            scene.end(runs.LAUNCHER)
        scene.wait_for_end(runs.LAUNCHER)

    return Row(cell.name, cell.fault, cell.phase, RANKS, play, **wanted)  # type: ignore[arg-type]


def _strike(scene: Scene, cell: Cell) -> None:
    if cell.victim != LAUNCHER:
        scene.say_go()
    elif cell.fault == KILL:
        scene.send(runs.LAUNCHER, signal.SIGKILL)
    elif cell.fault == STOP:
        runs.stop_launcher(scene, then=lambda: scene.say_go(RANKS))
    else:
        scene.say_go(RANKS)
