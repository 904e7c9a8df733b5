"""Collectives that do not end: a notice while ranks wait, and at the deadline one report for all ranks.

Part of the server's core, without I/O; each generation has one `Stuck`. When the first rank says that its collective
has reached its deadline, the server asks every member for its status. After the answers, or after 5 s, the generation
fails with the same report for all ranks: who waits where, in which line, who is missing, and who waits for whom in a
circle.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from gradsync.diagnostics.compare import Call, History, Wait, circle, circle_text, first_divergence
from gradsync.errors import name_ranks
from gradsync.rendezvous.wire import (
    MAX_STATUS_GROUPS,
    OF_MESSAGES,
    SILENT,
    STUCK,
    Calls,
    Failure,
    FrameError,
    clip_text,
    failure_room_bytes,
)

if TYPE_CHECKING:
    from gradsync.rendezvous.worlds import Generation, Member, Members

ANSWER_SECONDS = 5.0  # more than a busy machine takes to run one thread of each rank
_WARNING_SECONDS = 0.3  # the time from the first report to the notice, because waiting ranks report one by one
_MAX_COLLECTIVES = 1024
_MAX_NOTICED = 4
_MAX_REPORTS = 32
_MAX_SUMMARY_BYTES = 8192
_NO_ANSWER = "(it did not answer the server's status request in time)"


class Waiting(NamedTuple):
    """Ranks that wait in a collective, send or receive.

    Attributes:
        group, members: the group's name and members.
        number: of the collective; OF_MESSAGES for a send or receive.
        what: the collective in words.
        seconds: how long they have waited.
        ranks: the ranks that wait. In a rank's own report, this rank.
        missing: the ranks for which they wait; empty if the server does not know them.
    """

    group: str
    members: Members
    number: int
    what: str
    seconds: float
    ranks: tuple[int, ...]
    missing: tuple[int, ...]

    def text(self, verb: str = "waited") -> str:
        """Returns e.g. "rank 0 waited 5 s in all_reduce #57 for rank 1"."""
        text = f"{name_ranks(self.ranks)} {verb} {self.seconds:.3g} s in {self.what}"
        if self.missing:
            return f"{text} for {name_ranks(self.missing)}"
        return f"{text}; as far as the server knows, every rank has begun it"


Reports = dict[int, Waiting]  # rank -> its own report


class Stuck:
    """The ranks of a generation that wait in collectives.

    Attributes:
        due_at: when to call `advance`, in monotonic seconds; None: nobody waits for long.
    """

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._reports: dict[tuple[str, int], Reports] = {}  # by group and number
        self._notices: dict[tuple[str, int], float] = {}  # when each notice is due, the earliest first
        self._stuck: Reports = {}  # of those that have reached their deadline, in one collective; the first one first
        self._verdict_at: float | None = None
        self._unanswered: set[int] = set()
        self._texts: dict[int, str] = {}
        self._calls: dict[int, Calls] = {}

    @property
    def due_at(self) -> float | None:
        """See the class."""
        due = [*list(self._notices.values())[:1], *([] if self._verdict_at is None else [self._verdict_at])]
        return min(due, default=None) if self._generation.failure is None else None

    def report(self, now: float, waiting: Waiting, *, is_over: bool) -> list[Member]:
        """Records that a rank waits in a collective, or (`is_over`) has reached its deadline there.

        Returns:
            The members that the server must ask for their status.
        """
        [rank] = waiting.ranks
        if not is_over:
            self._note(now, waiting)
        elif self._verdict_at is None:
            self._stuck, self._verdict_at = {rank: waiting}, now + ANSWER_SECONDS
            present = self._generation.present()
            self._unanswered = {other for other, _ in present}
            return [member for _, member in present]
        elif waiting[:3:2] == _first(self._stuck)[:3:2]:  # the same group and number
            self._stuck[rank] = waiting
        return []

    def _note(self, now: float, waiting: Waiting) -> None:
        """Remembers a wait; each collective gets one notice, sends and receives may get more."""
        key = waiting.group, waiting.number
        if key not in self._reports or (waiting.number == OF_MESSAGES and key not in self._notices):
            if len(self._reports) >= _MAX_COLLECTIVES:
                oldest = next(iter(self._reports))
                del self._reports[oldest]
                self._notices.pop(oldest, None)
            self._reports[key] = {}
            self._notices[key] = now + _WARNING_SECONDS
        self._reports[key].setdefault(waiting.ranks[0], waiting)

    def answer(self, now: float, rank: int, status: Mapping[str, Any], text: str) -> None:
        """Records a rank's status.

        Raises:
            FrameError, ValueError, TypeError: it is malformed.
        """
        self._generation.members[rank].begun = check_counts({group: begun for group, (begun, _) in status.items()})
        calls_of = {group: calls for group, (_, calls) in status.items() if calls}
        for number, digest, what, runs in itertools.chain.from_iterable(calls_of.values()):
            if (type(number), type(digest), type(what), type(runs)) != (int, int, str, bool):
                raise FrameError("malformed STATUS: a call is a number, a digest, a text, and whether it runs")
        if rank in self._unanswered:
            self._unanswered.discard(rank)
            self._texts[rank] = text
            self._calls[rank] = calls_of
            if not self._unanswered:
                self._verdict_at = now

    def advance(self, now: float, notice: Callable[[str], None], state_of: Callable[[int], str]) -> Failure | None:
        """Writes the notices that are due; returns the failure that ends the generation, once it is known."""
        for key in [key for key, due_at in self._notices.items() if due_at <= now]:
            del self._notices[key]
            notice(self._notice_text(self._all_of(self._reports[key]), state_of))
        if self._verdict_at is None or now < self._verdict_at:
            return None
        return self._verdict(state_of)

    # -- The verdict ---------------------------------------------------------------------------------------------

    def _verdict(self, state_of: Callable[[int], str]) -> Failure:
        generation = self._generation
        for rank in sorted(self._unanswered):
            member = generation.members[rank]
            if member.is_present and member.pid and not member.host:
                state = state_of(member.pid)
                if state == "T":
                    text = (
                        f"{generation.name(rank)} was stopped (SIGSTOP?): its process needs a SIGCONT to continue; "
                        f"it did not answer for {ANSWER_SECONDS:g} s"
                    )
                    return Failure(rank, generation.phase, text, SILENT)
                if state and state not in "ZX":
                    self._texts.setdefault(
                        rank, "(it did not answer, but it runs: perhaps in a long call that holds Python's lock)"
                    )
        waits = self._all_of(self._stuck)
        first = waits[0]
        of_messages: Reports = {}
        if first.number == OF_MESSAGES:
            of_messages = {**self._reports.get((first.group, OF_MESSAGES), {}), **self._stuck}
        lines = self._disagreements(of_messages)
        # The culprit is the first missing rank that does not itself wait for others at the server.
        at_server = {rank for exchange in generation.exchanges.values() for rank in exchange.waiting}
        at_server |= {read.rank for reads in generation.reads.values() for read in reads}
        culprit = min(first.missing, key=lambda rank: (rank in at_server, rank), default=next(iter(self._stuck)))
        return Failure(culprit, generation.phase, self._report_text(waits, lines), STUCK, first.missing)

    def _all_of(self, reports: Reports) -> list[Waiting]:
        """Returns the collective with all its waiting and missing ranks, or each send and receive."""
        first = _first(reports)
        if first.number == OF_MESSAGES:
            return list(reports.values())
        members = self._generation.members
        waiting = {*reports, *self._reports.get((first.group, first.number), ())}
        begun = {}
        for rank in first.members:
            of_rank = members[rank].begun if rank in members else {}
            # If a member has reported the largest number of groups, this one may be missing from its report.
            if first.group in of_rank or len(of_rank) < MAX_STATUS_GROUPS:
                begun[rank] = of_rank.get(first.group, 0)
        missing = first.missing or [r for r, count in begun.items() if count < first.number and r not in waiting]
        waiting |= {r for r, count in begun.items() if count >= first.number and members[r].is_present}
        waiting -= set(missing)
        return [first._replace(ranks=tuple(sorted(waiting or reports)), missing=tuple(sorted(missing)))]

    # -- Texts ---------------------------------------------------------------------------------------------------

    def _notice_text(self, waits: Sequence[Waiting], state_of: Callable[[int], str]) -> str:
        """Returns one line for each wait, and one for each late rank; for one of each a single line."""
        waits = waits[:_MAX_NOTICED]
        waiting = {rank for each in waits for rank in each.ranks}
        late = {
            rank: self._state_text(rank, each.group, state_of)
            for each in waits
            for rank in each.missing[:_MAX_NOTICED]
            if rank not in waiting
        }
        parts = [each.text("has waited" if len(each.ranks) == 1 else "have waited") for each in waits]
        return ("; " if len(waits) == 1 and len(late) < 2 else "\n  ").join([*parts, *late.values()])

    def _report_text(self, waits: Sequence[Waiting], disagreements: Sequence[str]) -> str:
        """Returns a summary, the reports of at most 32 ranks (the missing ranks last), and advice."""
        first = waits[0]
        of_missing = self._grouped(first.missing)
        others = [rank for rank, _ in self._generation.present() if rank not in first.missing]
        of_others = self._grouped(others)
        shown_missing = of_missing[:_MAX_REPORTS]
        shown = [*of_others[: _MAX_REPORTS - len(shown_missing)], *shown_missing]
        left_out = len(of_missing) + len(of_others) - len(shown)
        summary = clip_text("\n".join([*[each.text() for each in waits], *disagreements]), _MAX_SUMMARY_BYTES)
        tail = f"\n\nand {left_out} more reports, left out here" if left_out else ""
        if first.missing and not disagreements:
            tail += (
                f"\n\n{name_ranks(first.missing)} did not arrive at {first.what}: see the report of each missing rank "
                "above. If ranks need more time, set GRADSYNC_COLLECTIVE_TIMEOUT_SECONDS=86400, or pass "
                "collective_timeout_seconds to init_process_group() or from_mpi()"
            )
        sections = [(self._heading(ranks, first), text) for ranks, text in shown]
        return _fit(summary, sections, tail, failure_room_bytes(len(first.missing)))

    def _grouped(self, ranks: Sequence[int]) -> list[tuple[list[int], str]]:
        """Returns the reports of these ranks; equal reports are listed once, with all their ranks."""
        groups: dict[str, list[int]] = {}
        for rank in ranks:
            text = self._texts.get(rank)
            if text is None:
                is_present = self._generation.members[rank].is_present
                text = _NO_ANSWER if is_present else "(it has left, by an orderly close)"
            groups.setdefault(text, []).append(rank)
        return [(ranks, text) for text, ranks in groups.items()]

    def _heading(self, ranks: list[int], waiting: Waiting) -> str:
        is_missing = ranks[0] in waiting.missing
        if len(ranks) > 1:
            who = name_ranks(ranks)
        else:
            who = self._state_text(ranks[0], waiting.group) if is_missing else self._name(ranks[0])
        return f"missing: {who}" if is_missing else who

    def _name(self, rank: int) -> str:
        process = self._generation.process(rank)
        return f"rank {rank} ({process})" if process else f"rank {rank}"

    def _state_text(self, rank: int, group: str, state_of: Callable[[int], str] | None = None) -> str:
        member = self._generation.members[rank]
        if not member.is_present:
            return f"{self._name(rank)} has left"
        if state_of is not None and member.pid and not member.host and state_of(member.pid) == "T":
            return f"{self._name(rank)} was stopped (SIGSTOP?)"
        begun = member.begun.get(group)
        progress = "" if begun is None else f", and has begun {begun} collective{'' if begun == 1 else 's'}"
        return f"{self._name(rank)} is {self._generation.phase}{progress}"

    def _disagreements(self, of_messages: Mapping[int, Waiting]) -> list[str]:
        """Returns a line for each group whose ranks called different collectives, and one if ranks wait in a circle."""
        members = {group: _first(reports).members for (group, _), reports in self._reports.items()}
        members[_first(self._stuck).group] = _first(self._stuck).members
        by_group: dict[str, dict[int, History]] = {}
        for rank, of_rank in self._calls.items():
            for group, calls in of_rank.items():
                by_group.setdefault(group, {})[rank] = {number: Call(digest, what) for number, digest, what, _ in calls}
        found = [first_divergence(group, histories) for group, histories in sorted(by_group.items())]
        lines = [divergence.text() for divergence in found if divergence is not None]
        waits = [Wait(rank, each.group, 0, each.what, each.missing) for rank, each in sorted(of_messages.items())]
        behind = {group: _behind(histories, members.get(group, ())) for group, histories in by_group.items()}
        for rank, of_rank in sorted(self._calls.items()):
            for group, calls in of_rank.items():
                waits += [
                    Wait(rank, group, number, what, behind[group](number)) for number, _, what, runs in calls if runs
                ]
        round_about = circle(waits)
        return lines if round_about is None else [*lines, circle_text(round_about)]


def check_counts(begun: Mapping[str, int]) -> dict[str, int]:
    """Returns the number of collectives that a rank has begun in each group.

    Raises:
        FrameError: it has other keys or values.
    """
    if not all(type(group) is str and type(count) is int for group, count in begun.items()):
        raise FrameError("malformed message: each group's name needs a number of collectives")
    return dict(begun)


def _behind(histories: Mapping[int, History], members: Members) -> Callable[[int], tuple[int, ...]]:
    """Returns a function of a collective's number: the members that are known not to have begun it.

    The ranks that wait in one collective share the answer: of a thousand ranks almost all do.
    """
    begun = {rank: max(history, default=0) for rank, history in histories.items()}

    @cache
    def behind(number: int) -> tuple[int, ...]:
        return tuple([rank for rank in members if begun.get(rank, number) < number])

    return behind


def _first(reports: Reports) -> Waiting:
    return next(iter(reports.values()))


def _fit(summary: str, sections: list[tuple[str, str]], tail: str, max_bytes: int) -> str:
    """Returns summary, sections and tail in at most `max_bytes`.

    The sections get equal shares of the space. If a section needs less than its share, later sections get more.
    """
    room = max_bytes - len((summary + tail).encode())
    parts = [summary]
    for index, (heading, text) in enumerate(sections):
        indented = "\n".join([f"  {line}".rstrip() for line in text.strip("\n").splitlines()])
        part = clip_text(f"\n\n{heading}:\n{indented}", room // (len(sections) - index))
        room -= len(part.encode())
        parts.append(part)
    return "".join([*parts, tail])
