"""Contenders take turns, round by round; a round counts with its slowest rank. Tests use `contenders`, `Compare`."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import numpy as np
import pytest

import systems
from teams import Absent, Here, Launched, Make, RanksFailed, Team

ROOT = Path(__file__).resolve().parents[1]


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
        notes: by contender, what is no time.
        closing: what the output says at its end about the seconds of all rounds, by contender.
    """

    name: str
    seconds: dict[str, list[list[float]]] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    notes: dict[str, dict[str, Any]] = field(default_factory=dict)
    closing: Callable[[dict[str, list[float]]], str] | None = None

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


class Asked(Protocol):
    """Ranks, or the process of pytest."""

    backend: str

    def ask(self, what: str, *arguments: Any) -> list[Any]: ...


class Teams:
    """All teams of a session, started when they are first needed.

    Args:
        ranks: of a team.
        commits: of --against: a contender each, with the name of the commit.
        starts: how often the ranks of a row are started anew. The place of its memory makes a process faster than
            another for its whole life, by several per cent, and by a fifth where arrays are new in each step.
    """

    def __init__(self, ranks: int, commits: Sequence[str] = (), starts: int = 1) -> None:
        self.ranks, self.commits, self.starts = ranks, commits, starts
        self.launched: Launched | None = None
        self.here = Here()
        self._teams: dict[Any, Team] = {}
        self._folder: Path | None = None
        self._failed: str | None = None

    def of(self, contender: str, ranks: int | None, variables: Mapping[str, str]) -> Asked:
        """Returns the team of a contender.

        Raises:
            Absent: what it needs is not installed.
        """
        if self._failed:
            raise RanksFailed(f"the ranks are gone since this failed: {self._failed}")
        if self.launched is not None:
            if ranks not in (None, self.ranks) or variables:
                raise Absent("this row starts ranks of its own: run it without a launcher")
            return self.launched
        system = contender if contender in self.commits else systems.SYSTEMS.get(contender, "gradsync")
        count = ranks or self.ranks
        key = system, count, tuple(variables.items())
        if key not in self._teams:
            launcher = systems.launcher_of(system, count)
            self._teams[key] = Team(launcher, count, self._source_of(system), variables)
        return self._teams[key]

    def end(self) -> None:
        """Ends all teams; who is needed again is started again."""
        for team in self._teams.values():
            team.close()
        self._teams.clear()

    def failed(self, what: str) -> None:
        """Ends all teams after a failure; ranks that pytest has not started cannot be started again."""
        if self.launched is not None:
            self._failed = what
        self.end()

    def close(self) -> None:
        self.end()
        if self.launched is not None and not self._failed:
            self.launched.close()
        if self._folder is not None:
            for commit in self.commits:
                _git("worktree", "remove", "--force", str(self._folder / commit))
            shutil.rmtree(self._folder)

    def _source_of(self, system: str) -> Path:
        """Returns the folder of a team's gradsync.

        With --against all are in folders of the same length, whose paths shift the memory of a process alike.
        """
        if not self.commits:
            return ROOT / "src"
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="against-"))
            for commit in self.commits:
                _git("worktree", "add", "--detach", str(self._folder / commit), commit)
            shutil.copytree(ROOT / "src", self._folder / "checkout" / "src")
        return self._folder / (system if system in self.commits else "checkout") / "src"


def commit_of(revision: str) -> str:
    """Returns the first 8 digits of a commit.

    Raises:
        pytest.UsageError: there is none.
    """
    try:
        return _git("rev-parse", "--verify", f"{revision}^{{commit}}")[:8]
    except subprocess.CalledProcessError as error:
        raise pytest.UsageError(f"--against {revision}: {error.stderr.strip()}") from None


def _git(*arguments: str) -> str:
    return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True).stdout


class Compare:
    """The fixture `compare`: measures a row once, for all its contenders in turns, and counts this case's contender.

    Attributes:
        disabled: --benchmark-disable: each case runs one round, to see that it runs.
        commits: of --against.
    """

    def __init__(self, contender: str, all_contenders: Sequence[str], benchmark: Any, teams: Teams, rows: Any) -> None:
        self.disabled: bool = benchmark.disabled
        self.commits = teams.commits
        self._contender, self._contenders = contender, all_contenders
        self._benchmark, self._teams, self._rows = benchmark, teams, {} if benchmark.disabled else rows
        self._where: tuple[int | None, Mapping[str, str]] = None, {}
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
        closing: Callable[[dict[str, list[float]]], str] | None = None,
    ) -> None:
        """Times the steps that make(contender, *arguments) returns on each rank.

        Args:
            name: of the row.
            make: is called on each rank of the contender's team; checks its result, and raises Absent if the contender
                cannot do this.
            arguments: for `make`.
            rounds, warm_up: rounds that count, and those before.
            calls: of a step in a round, for those that are short.
            ranks: if not --ranks.
            environment: variables of the ranks.
            closing: see Row.
        """
        self._where = ranks, environment or {}
        self._measure(name, make, arguments, rounds, warm_up, calls, closing)

    def here(
        self,
        name: str,
        make: Make,
        *arguments: Any,
        rounds: int = 5,
        warm_up: int = 1,
        closing: Callable[[dict[str, list[float]]], str] | None = None,
    ) -> None:
        """The same in the process of pytest, without ranks."""
        self._measure(name, make, arguments, rounds, warm_up, 1, closing, here=True)

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Calls a function on each rank of this contender's team; returns the results, by rank."""
        return self._team(self._contender).ask("run", function, *arguments)

    def note(self, **values: Any) -> None:
        """Adds what is no time to this case."""
        self._benchmark.extra_info |= values
        self._row.notes.setdefault(self._contender, {}).update(values)

    def _team(self, contender: str, *, here: bool = False) -> Asked:
        return self._teams.here if here else self._teams.of(contender, *self._where)

    def _measure(
        self, name: str, make: Make, arguments: Any, rounds: int, warm_up: int, calls: int, closing: Any, **here: bool
    ) -> None:
        taking_part = self._contenders
        if self.disabled:
            taking_part, rounds, warm_up, calls = [self._contender], 1, 0, 1
        if name not in self._rows:
            self._rows[name] = row = Row(name, closing=closing)
            try:
                self._take_turns(row, taking_part, make, arguments, rounds, warm_up, calls, **here)
            except RanksFailed:
                self._teams.failed(name)
                raise
        self._row = row = self._rows[name]
        if self._contender in row.absent:
            pytest.skip(row.absent[self._contender])
        if self._contender not in row.seconds:
            pytest.fail("the row was not measured, see above")
        samples = row.all_seconds()[self._contender]
        times = iter(samples)

        def advance() -> None:
            CLOCK.now += next(times)

        self._benchmark.group, self._benchmark.name = name, self._contender
        if not here:
            team = self._team(self._contender)
            self._benchmark.extra_info |= {"ranks": self._where[0] or self._teams.ranks, "backend": team.backend}
        self._benchmark.pedantic(advance, rounds=len(samples))

    def _take_turns(
        self, row: Row, taking_part: Sequence[str], make: Make, arguments: Any, rounds: int, warm_up: int, calls: int,
        **here: bool,
    ) -> None:  # fmt: skip
        seconds: dict[str, list[list[float]]] = {contender: [] for contender in taking_part}
        for start in range(1 if self.disabled or here else self._teams.starts):
            if start:
                self._teams.end()
            teams = dict(self._prepared(row, taking_part, make, arguments, **here))
            for contender in teams:
                seconds[contender].append([])
            for number in range(warm_up + rounds):
                for contender in list(teams)[:: -1 if number % 2 else 1]:  # none always follows the same other one
                    slowest = max(teams[contender].ask("time", contender, calls))
                    if number >= warm_up:
                        seconds[contender][-1].append(slowest)
            for team in teams.values():
                team.ask("release")
        row.seconds = {contender: seconds[contender] for contender in teams}

    def _prepared(
        self, row: Row, taking_part: Sequence[str], make: Make, arguments: Any, **here: bool
    ) -> Iterator[tuple[str, Asked]]:
        for contender in taking_part:
            try:
                team = self._team(contender, **here)
                team.ask("prepare", make, contender, *arguments)
            except Absent as absent:
                row.absent[contender] = str(absent)
            else:
                yield contender, team
