"""What a rank tells of its groups, of which there may be more than fit a message."""

from __future__ import annotations

from typing import Any

import pytest

from gradsync.communicators import failures
from gradsync.communicators.agreement import agreement_on
from gradsync.diagnostics.recorder import FlightRecorder
from gradsync.rendezvous.frames import MAX_STATUS_GROUPS

BARRIER = agreement_on("barrier", (), None, "")


class Group:
    """What the status looks at."""

    def __init__(self, name: str, world_size: int = 2) -> None:
        self.recorder = FlightRecorder(name, world_size, "shm")

    def use(self, *, ends: bool = True) -> None:
        self.recorder.begin(BARRIER)
        if ends:
            self.recorder.end()


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    groups = [Group(f"g{number}") for number in range(2 * MAX_STATUS_GROUPS)]
    monkeypatch.setattr(failures, "usable_recorders", lambda: [group.recorder for group in groups])
    return groups


def test_few_groups_are_all_told(groups: list[Any]) -> None:
    del groups[3:]
    groups.append(Group("alone", world_size=1))
    groups[1].use()
    assert failures.positions() == {"g0": 0, "g1": 1, "g2": 0}
    assert "no collective of group 'g0' yet" in failures.status_report()[0]


def test_of_many_groups_those_in_use_are_told(groups: list[Any]) -> None:
    groups[7].use(ends=False)
    for group in groups[5:]:
        if group is not groups[7]:
            group.use()
    groups[0].use()
    told = failures.positions()
    assert len(told) == MAX_STATUS_GROUPS
    assert set(told) == {"g0", "g7"} | {group.recorder.group for group in groups[-MAX_STATUS_GROUPS + 2 :]}
    assert next(iter(told)) == "g7"  # in a collective now
    report, _ = failures.status_report()
    assert report.index("group 'g7'") < report.index("group 'g0'")
    assert "group 'g1'" not in report
    assert "test_status.py" in report  # the stacks still have room
