"""Contenders take turns, round by round; a round counts with its slowest rank. Tests use `contenders`, `Compare`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np
import pytest

from systems import Absent
from teams import AnyTeam, Make, RanksFailed, Teams

Closing = Callable[[dict[str, list[float]]], str]


def contenders(*names: str) -> pytest.MarkDecorator:
    """Marks a test with those who take part; it becomes one case for each."""
    return pytest.mark.contenders(*names)


class Clock:
    """The timer of pytest-benchmark. It moves only by what the ranks have measured."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


CLOCK = Clock()


@dataclass
class Row:
    """What was measured side by side.

    Attributes:
        name: what is timed; the `group` of pytest-benchmark.
        seconds: for each contender, for each start of its ranks, the seconds of each round on the slowest rank.
        absent: why a contender takes no part.
        notes: what the output says at its end, beside times.
        closing: the same about the seconds of all rounds, by contender.
    """

    name: str
    closing: Closing | None = None
    seconds: dict[str, list[list[float]]] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def all_seconds(self) -> dict[str, list[float]]:
        return {name: [one for start in starts for one in start] for name, starts in self.seconds.items()}

    def ratio(self, contender: str, other: str) -> tuple[float, float, float]:
        """Returns the ratio of two times and its 95 % interval, by resampling the starts, or else the rounds."""
        ours, others = self.seconds[contender], self.seconds[other]
        if len(ours) > 1:
            ratios = np.array([median(a) / median(b) for a, b in zip(ours, others, strict=True)])
        else:
            ratios = np.array(ours[0]) / np.array(others[0])
        chosen = np.random.default_rng(0).integers(len(ratios), size=(10_000, len(ratios)))
        low, high = np.quantile(np.median(ratios[chosen], axis=1), [0.025, 0.975])
        return float(np.median(ratios)), float(low), float(high)


class Compare:
    """The fixture `compare`: measures a row once, for all its contenders in turns, and counts this case's contender.

    Attributes:
        disabled: --benchmark-disable: each case runs one round, to see that it runs.
        commits: of --against.
        contender: of this case.
    """

    def __init__(self, contender: str, side_by_side: Sequence[str], benchmark: Any, teams: Teams, rows: Any) -> None:
        self.disabled: bool = benchmark.disabled
        self.commits = teams.commits
        self.contender, self._side_by_side = contender, [contender] if self.disabled else side_by_side
        self._benchmark, self._teams, self._rows = benchmark, teams, {} if self.disabled else rows
        self._row: Row = Row("")

    def __call__(
        self,
        name: str,
        make: Make,
        *arguments: Any,
        rounds: int = 20,
        warm_up: int = 3,
        calls: int = 1,
        ranks: int | None = None,
        environment: Mapping[str, str] | None = None,
        closing: Closing | None = None,
    ) -> AnyTeam:
        """Times the steps that make(contender, *arguments) returns on each rank. Returns this contender's team.

        Args:
            name: of the row.
            make: is called on each rank of the contender's team; checks its result, and raises Absent if the contender
                cannot do this.
            arguments: for `make`.
            rounds, warm_up: rounds that count, and those before.
            calls: of a step in a round, for those that are short.
            ranks: if not --ranks; 0: the step is called in the process of pytest.
            environment: variables of the ranks.
            closing: see Row.
        """
        if self.disabled:
            rounds, warm_up, calls = 1, 0, 1

        def prepare(contender: str) -> AnyTeam:
            team = self._teams.of(contender, ranks, environment or {})
            team.ask("prepare", make, contender, *arguments)
            return team

        if name not in self._rows:
            self._rows[name] = Row(name, closing)
            starts = 1 if self.disabled or ranks == 0 else self._teams.starts
            try:
                self._take_turns(self._rows[name], prepare, starts, rounds, warm_up, calls)
            except RanksFailed as error:
                self._teams.failed(name)
                pytest.fail(str(error), pytrace=False)
        self._row = self._rows[name]
        if self.contender in self._row.absent:
            pytest.skip(self._row.absent[self.contender])
        if self.contender not in self._row.seconds:
            pytest.fail("the row was not measured, see above", pytrace=False)
        team = self._teams.of(self.contender, ranks, environment or {})
        if ranks != 0:
            self._benchmark.extra_info |= {"ranks": ranks or self._teams.ranks, "backend": team.backend}
        self._count(self._row.all_seconds()[self.contender])
        return team

    def note(self, **values: Any) -> None:
        """Adds what is no time to this case: to its JSON, and to the end of the output."""
        self._benchmark.extra_info |= values
        texts = [f"{k.replace('_', ' ')} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in values.items()]
        self._row.notes.append(f"{self._row.name}, {self.contender}: {', '.join(texts)}")

    def _take_turns(
        self, row: Row, prepare: Callable[[str], Any], starts: int, rounds: int, warm_up: int, calls: int
    ) -> None:
        measured: dict[str, list[list[float]]] = {}
        for start in range(starts):
            if start:
                self._teams.end()
            teams = {}
            for contender in self._side_by_side:
                try:
                    teams[contender] = prepare(contender)
                except Absent as absent:
                    row.absent[contender] = str(absent)
            seconds: dict[str, list[float]] = {contender: [] for contender in teams}
            for number in range(warm_up + rounds):
                for contender in list(teams)[:: -1 if number % 2 else 1]:  # none always follows the same other one
                    slowest = max(teams[contender].ask("time", contender, calls))
                    if number >= warm_up:
                        seconds[contender].append(slowest)
            for contender, team in teams.items():
                measured.setdefault(contender, []).append(seconds[contender])
                team.ask("release")
        row.seconds = measured

    def _count(self, samples: Sequence[float]) -> None:
        """Gives pytest-benchmark what was measured: its clock moves by it."""
        times = iter(samples)

        def advance() -> None:
            CLOCK.now += next(times)

        self._benchmark.group, self._benchmark.name = self._row.name, self.contender
        self._benchmark.pedantic(advance, rounds=len(samples))
