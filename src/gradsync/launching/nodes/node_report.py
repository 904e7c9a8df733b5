"""How the start of a run ended on one machine, as its launcher tells the others; and whose end was the cause."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from gradsync.errors import RendezvousError
from gradsync.launching.failure_report import failure_text
from gradsync.launching.outcome import Outcome, distance_from_cause, signal_name
from gradsync.launching.told import from_told

SAME_VERSION = "run the same version of gradsync on every machine"

_MAX_TEXT_BYTES = 40 * 1024  # in a value of at most 60 KiB

# How near to the cause an end is. A signal to a launcher comes first, and one that is lost: no rank's failure can be
# why. Then come the failures of ranks, as `distance_from_cause` sorts them.
_SIGNALLED, _LOST, _SUFFERING = -2, -1, 2


@dataclass(frozen=True)
class NodeReport:
    """How a start of the ranks ended on one machine.

    Attributes:
        node: the machine's number.
        level: how near to the cause it is, the least is nearest; None where nothing failed.
        how: what happened to the node, in words that follow its name.
        text: the report on its ranks, whole lines.
        exit_code: for all launchers, where this is the cause.
        may_retry: whether the ranks may be started again.
    """

    node: int
    level: int | None = None
    how: str = ""
    text: str = ""
    exit_code: int = 0
    may_retry: bool = True

    @property
    def is_signalled(self) -> bool:
        """Whether somebody told the launcher to end."""
        return self.level == _SIGNALLED

    @property
    def only_suffers(self) -> bool:
        """Whether its ranks failed, as far as is known, only because of one on another machine."""
        return self.level is not None and self.level >= _SUFFERING

    def to_bytes(self) -> bytes:
        """Returns what `from_bytes` takes."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> NodeReport:
        """Returns what another launcher has told.

        Raises:
            RendezvousError: that is no such report.
        """
        try:
            return from_told(cls, data)
        except ValueError as error:
            raise RendezvousError(f"the report of another launcher cannot be read: {error}; {SAME_VERSION}") from None


@dataclass(frozen=True)
class FirstWord:
    """That a launcher's ranks fail, as the first one of a run to see that tells the others.

    Attributes:
        node: the machine's number.
        only_suffers: whether that is because of a rank on another machine, as far as is known.
        report: where it is told at once, of a launcher whose ranks have ended.
    """

    node: int
    only_suffers: bool
    report: NodeReport | None = None

    def to_bytes(self) -> bytes:
        """Returns what `from_bytes` takes."""
        report = "" if self.report is None else self.report.to_bytes().decode()
        return json.dumps({"node": self.node, "only_suffers": self.only_suffers, "report": report}).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> FirstWord:
        """Returns what another launcher has told.

        Raises:
            RendezvousError: that is no such word.
        """
        try:
            told = from_told(_ToldWord, data)
        except ValueError as error:
            raise RendezvousError(f"the word of another launcher cannot be read: {error}; {SAME_VERSION}") from None
        report = NodeReport.from_bytes(told.report.encode()) if told.report else None
        return cls(told.node, told.only_suffers, report)


@dataclass(frozen=True)
class _ToldWord:
    """The same as it travels, with the report as text."""

    node: int
    only_suffers: bool
    report: str


def report_of(node: int, outcome: Outcome) -> NodeReport:
    """Returns the report on the ranks of this machine."""
    root = outcome.root_cause
    if outcome.signal_number is not None:
        return signal_report(node, outcome.signal_number, failure_text(outcome))
    if root is None:
        return NodeReport(node)
    level = distance_from_cause(root)[0]
    text = _clipped(failure_text(outcome))
    return NodeReport(node, level, "failed", text, outcome.exit_code, outcome.may_be_tried_again)


def signal_report(node: int, number: int, text: str = "") -> NodeReport:
    """Returns the report of a launcher that was told to end."""
    how = f"was stopped by {signal_name(number)}"
    return NodeReport(node, _SIGNALLED, how, _clipped(text), 128 + number, may_retry=False)


def loss_report(node: int, how: str) -> NodeReport:
    """Returns a report on behalf of a launcher that cannot tell it."""
    return NodeReport(node, _LOST, how, exit_code=1)


def cause_of(reports: Iterable[NodeReport], first_node: int | None) -> NodeReport | None:
    """Returns the cause; None where nothing failed.

    Args:
        reports: of all machines, as far as they are known.
        first_node: the one that was the first to say that it has failed, if one did.
    """
    failed = [report for report in reports if report.level is not None]
    return min(failed, key=lambda report: (report.level, report.node != first_node, report.node), default=None)


def _clipped(text: str) -> str:
    """Leaves out the beginning of a long text: the cause comes last."""
    if len(json.dumps(text)) <= _MAX_TEXT_BYTES:
        return text
    while len(json.dumps(text)) > _MAX_TEXT_BYTES:
        text = text[len(text) // 8 + 1 :]
    return f"gradsync: (the beginning of this report is left out)\n{text.partition(chr(10))[2]}"
