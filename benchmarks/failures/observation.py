"""The observations of a failure: one round, and all rounds together."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from failures.confinement import Unavailable
from failures.diary import ERROR, FAULT, READY, Note
from failures.scene import Scene, SceneFailed

RAISED, REPORTED, DOWN = "raised", "reported", "down"
_VERDICT = re.compile(
    r"^gradsync: rank (?P<rank>\d+) \(pid \d+ on \S+\) (was killed|failed).*?(because of rank (?P<other>\d+))?:?$"
)


@dataclass(frozen=True)
class Row:
    """A failure, its cause, and the expected reports.

    Attributes:
        name: short, for the command line.
        failure, phase: their names in the table.
        ranks: how many there are.
        play: causes the failure.
        raising: ranks that must get an error.
        all_raise: whether all of them must, or one is enough, as the launcher may have ended the others by then.
        errors: their types.
        names: words that each such error must contain.
        report: patterns of lines that must be printed.
        exit_codes: by the name of the scene's process.
        told_within: seconds until the errors are raised, and until the report is there.
        down_within: seconds until all processes have ended.
        ends_run: whether the failure ends the run, so that the time of its end counts.
        begins_with_waiting: the clock starts when the last of those ranks waits, and not with the culprit.
        culprit: the rank that must be named by each error that names one, and by the launcher's verdict.
        needs: returns why this machine cannot show it, or None.
    """

    name: str
    failure: str
    phase: str
    ranks: int
    play: Callable[[Scene], None]
    raising: tuple[int, ...] = ()
    all_raise: bool = True
    errors: tuple[str, ...] = ()
    names: str = ""
    report: tuple[str, ...] = ()
    exit_codes: Mapping[str, int] = field(default_factory=dict)
    told_within: float | None = None
    down_within: float | None = None
    ends_run: bool = True
    begins_with_waiting: bool = False
    culprit: int | None = None
    needs: Callable[[], str | None] = lambda: None

    def target(self, measured: str) -> float | None:
        return self.down_within if measured == DOWN else self.told_within


@dataclass(frozen=True)
class Observation:
    """One round.

    Attributes:
        seconds: from the failure, by the name of the moment.
        errors: types of the errors that ranks got.
        complaints: missing or wrong reports.
        left_behind: processes, ports and files that were still there.
    """

    seconds: dict[str, float]
    errors: tuple[str, ...]
    complaints: tuple[str, ...]
    left_behind: tuple[str, ...]


@dataclass
class Result:
    """All rounds of a row; none if it was skipped."""

    row: Row
    rounds: list[Observation] = field(default_factory=list)
    skipped: str | None = None

    @property
    def complaints(self) -> list[str]:
        return [complaint for round_ in self.rounds for complaint in round_.complaints]

    @property
    def left_behind(self) -> list[str]:
        return [thing for round_ in self.rounds for thing in round_.left_behind]

    @property
    def is_good(self) -> bool:
        """Whether all reports were right and nothing was left behind, however late."""
        return not self.complaints and not self.left_behind

    @property
    def missed(self) -> list[str]:
        """The moments that came later than their targets, in the worst round."""
        summaries = {what: self.summary(what) for what in (RAISED, REPORTED, DOWN)}
        return [what for what, summary in summaries.items() if summary is not None and summary["met"] is False]

    def problems(self) -> list[str]:
        """Returns lines about what was skipped, late or wrong, and what was left behind."""
        wrong = dict.fromkeys([*self.complaints, *(f"left {thing}" for thing in self.left_behind)])
        late = [f"{what} later than its target" for what in self.missed]
        skipped = [] if self.skipped is None else [f"skipped: {self.skipped}"]
        return [f"{self.row.name}: {text}" for text in (*skipped, *late, *wrong)]

    def samples(self, measured: str) -> list[float]:
        return [round_.seconds[measured] for round_ in self.rounds if measured in round_.seconds]

    def summary(self, measured: str) -> dict[str, Any] | None:
        """Returns the statistics of one of the moments; None if it was not measured."""
        samples = self.samples(measured)
        if not samples:
            return None
        target = self.row.target(measured)
        return {
            "target_seconds": target,
            "median_seconds": statistics.median(samples),
            "worst_seconds": max(samples),
            "met": None if target is None else max(samples) <= target,
            "samples": samples,
        }

    def as_json(self) -> dict[str, Any]:
        row = self.row
        return {
            "name": row.name,
            "failure": row.failure,
            "phase": row.phase,
            "ranks": row.ranks,
            "skipped": self.skipped,
            "measured": {what: self.summary(what) for what in (RAISED, REPORTED, DOWN)},
            "errors": dict(Counter(error for round_ in self.rounds for error in round_.errors)),
            "culprit_named": None if self.skipped else not self.complaints,
            "complaints": self.complaints,
            "left_behind": self.left_behind,
        }


def observe(row: Row, rounds: int) -> Result:
    """Causes a failure so many times."""
    reason = row.needs()
    if reason is not None:
        return Result(row, skipped=reason)
    result = Result(row)
    for _ in range(rounds):
        try:
            result.rounds.append(_play_round(row))
        except Unavailable as unavailable:
            return Result(row, skipped=str(unavailable))
    return result


def _play_round(row: Row) -> Observation:
    with Scene() as scene:
        try:
            row.play(scene)
        except SceneFailed as failure:
            return Observation({}, (), (str(failure),), tuple(scene.left_behind()[1]))
        ended_at, left = scene.left_behind()
        began = _beginning(row, scene)
        errors = [note for note in scene.of(ERROR) if note.rank in row.raising and note.facts["is_typed"]]
        reported_at = [_time_of(pattern, scene) for pattern in row.report]
        moments = {RAISED: [note.at for note in errors], REPORTED: [at for at in reported_at if at is not None]}
        seconds = {what: max(at) - began for what, at in moments.items() if at}
        if row.ends_run:
            seconds[DOWN] = (scene.down_at or ended_at) - began
        complaints = [*_complaints_of_errors(row, errors), *_complaints_of_report(row, scene)]
        complaints += _complaints_of_culprit(row, scene)
        types = tuple(note.facts["type"] for note in errors)
        return Observation(seconds, types, tuple(complaints), tuple(left))


def _beginning(row: Row, scene: Scene) -> float:
    if row.begins_with_waiting:
        return max(note.at for note in scene.of(READY) if note.rank in row.raising or not row.raising)
    return scene.of(FAULT)[-1].at


def _time_of(pattern: str, scene: Scene) -> float | None:
    return next((line.at for line in scene.lines if re.search(pattern, line.text)), None)


def _complaints_of_errors(row: Row, errors: Sequence[Note]) -> list[str]:
    complaints = []
    for rank in row.raising:
        own = [note.facts for note in errors if note.rank == rank]
        if not own and (row.all_raise or not errors):
            complaints.append(f"rank {rank} got no error of ours")
        complaints += [
            f"rank {rank} got {facts['type']}: {facts['text'][:300]}"
            for facts in own
            if facts["type"] not in row.errors or not re.search(row.names, facts["text"])
        ]
    return complaints


def _complaints_of_culprit(row: Row, scene: Scene) -> list[str]:
    """Returns complaints: another rank than the culprit was named, or an error is not gradsync's."""
    if row.culprit is None:
        return []
    complaints = []
    for note in scene.of(ERROR):
        if note.rank in row.raising and note.facts["blamed"] not in (None, row.culprit):
            complaints.append(f"rank {note.rank} blames rank {note.facts['blamed']}: {note.facts['text'][:300]}")
        if note.rank != row.culprit and not note.facts["is_typed"]:
            complaints.append(
                f"rank {note.rank} got {note.facts['type']}, which is not ours: {note.facts['text'][:300]}"
            )
    verdict = blamed_by_launcher(scene)
    if verdict not in (None, row.culprit):
        complaints.append(f"the launcher blames rank {verdict}")
    return complaints


def blamed_by_launcher(scene: Scene) -> int | None:
    """Returns the rank that the last line of a launcher's report names as the cause, or None."""
    verdicts = [found for line in scene.lines if (found := _VERDICT.search(line.text)) is not None]
    return int(verdicts[-1]["other"] or verdicts[-1]["rank"]) if verdicts else None


def _complaints_of_report(row: Row, scene: Scene) -> list[str]:
    missing = [pattern for pattern in row.report if _time_of(pattern, scene) is None]
    complaints = []
    if missing:
        printed = "\n".join(line.text for line in scene.lines[-20:])
        complaints.append(f"nothing printed fits {missing}, but:\n{printed}")
    for name, code in row.exit_codes.items():
        if scene.exit_code(name) != code:
            complaints.append(f"{name} ended with {scene.exit_code(name)} in place of {code}")
    return complaints
