"""What the server says about a rank, in words: it may not join, others wait for it, it ended, failed or is silent.

Part of the server's core, without I/O; `absence_report` has the words for a rank that does not come to a collective.
"""

from __future__ import annotations

from gradsync.rendezvous.finding import Finding
from gradsync.rendezvous.messages import PROTOCOL_VERSION
from gradsync.rendezvous.roster import JOINING_PHASE, Roster
from gradsync.rendezvous.waiting import Failure


def join_refusal(expected_size: int, version: int, rank: int, world_size: int, called: str) -> str:
    """Returns why a join cannot be accepted, with both values, or an empty text."""
    if version != PROTOCOL_VERSION:
        return (
            f"the server speaks protocol version {PROTOCOL_VERSION}, {called} {rank} version {version}; "
            f"run the same version of gradsync on every {called}"
        )
    if world_size != expected_size:
        return f"the server expects world_size {expected_size}, {called} {rank} came with {world_size}"
    if rank >= expected_size:
        return f"the server expects {called}s 0 to {expected_size - 1}, got {called} {rank}"
    return ""


def incomplete(roster: Roster) -> str:
    """Returns the notice about the ranks that keep the others waiting."""
    where = roster.whereabouts(roster.missing_ranks())
    return f"{len(roster.members)} of {roster.world_size} {roster.called}s have joined; waiting for {where}"


def death(roster: Roster, rank: int, cause: str) -> Failure:
    """Returns the failure of a generation that lost a rank's connection."""
    lost = f"its control connection was lost without a goodbye ({cause})"
    return Failure(rank, roster.phase, f"{roster.name(rank)} died in phase {roster.phase!r}: {lost}")


def ended(roster: Roster, rank: int, how: str) -> Failure:
    """Returns the failure of a generation that waits for a rank whose process has ended."""
    return Failure(rank, JOINING_PHASE, f"{roster.label(rank)} {how} without joining: the others would wait in vain")


def standstill(roster: Roster, rank: int, pid: int, finding: Finding, seconds: float) -> Failure:
    """Returns the failure of a generation that waits for a rank whose process stands still."""
    who = f"{roster.label(rank)} (pid {pid})"
    evidence = f"found so for {seconds:.1f} s, while others waited"
    text = finding.of_lost(who, evidence, where=" before it joined")
    return Failure(rank, JOINING_PHASE, text, is_silence=True)


def reported(roster: Roster, rank: int, reason: str, culprit: int | None) -> Failure:
    """Returns the failure of a generation whose rank said that it failed, or that the culprit, another one, did."""
    told = f"{roster.name(rank)} failed in phase {roster.phase!r}: {reason}"
    return Failure(rank if culprit is None or culprit not in roster.members else culprit, roster.phase, told)


def silence(roster: Roster, rank: int, finding: Finding, evidence: str) -> Failure:
    """Returns the failure of a generation with a rank that is silent and was found stopped, gone or unreachable."""
    text = finding.of_lost(roster.name(rank), evidence, where=f" in phase {roster.phase!r}")
    return Failure(rank, roster.phase, text, is_silence=True)


def slowness(roster: Roster, rank: int, finding: Finding, silent_seconds: float) -> str:
    """Returns the notice about a rank that is silent although nothing was found."""
    return finding.of_slow(f"{roster.name(rank)}, in phase {roster.phase!r},", silent_seconds)


def revival(roster: Roster, rank: int) -> str:
    """Returns the notice that such a rank is back."""
    return f"{roster.name(rank)} is heard of again"
