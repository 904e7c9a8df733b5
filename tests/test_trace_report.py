"""What gradsync trace says of dumps: differences and circles first, then progress, then each rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from gradsync.diagnostics.dump import FORMAT, Call, Dump, Entry, Group
from gradsync.diagnostics.report import report

State = Literal["runs", "ended", "failed"]
Collective = tuple[Entry, Call]


def call(number: int, what: str, state: State = "ended", *, key: str = "", arrays: tuple[str, ...] = ()) -> Collective:
    ended = None if state == "runs" else 100.0 + number + 0.5
    return Entry(number, key or what, False, state, 100.0 + number, ended), Call(what, (what, *arrays))


def group(*calls: Collective, ranks: tuple[int, ...] = (0, 1, 2)) -> Group:
    entries = tuple(entry for entry, _ in calls)
    return Group(ranks, max((each.number for each in entries), default=0), entries, {e.call: c for e, c in calls})


def dump(rank: int | None, *, at: float = 200.0, **groups: Group) -> Dump:
    path, package = f"gradsync-rank{rank}.json", "/usr/lib/gradsync/"
    why = "it was asked for"
    return Dump(FORMAT, path, why, "", rank, 4200, "node1", "boot", at, at, package, "", groups, (), (), ())


STACKS = """MainThread, innermost call first:
  /usr/lib/gradsync/bucketing/with_blocks.py:12 in backward
    self.flush()
  train.py:12 in read
    with sync.backward():
  train.py:40 in <module>
loader, innermost call first:
  data.py:7 in fetch"""

COMMON = [call(1, "barrier"), call(2, "all_reduce(sum)")]


def test_the_difference_comes_first_and_then_who_is_where() -> None:
    calls = {0: call(3, "flush"), 1: call(3, "broadcast(root 0)", "runs"), 2: call(3, "flush", "failed")}
    dumps = [dump(rank, world=group(*COMMON, calls[rank])) for rank in range(3)]
    dumps[1] = replace(dumps[1], stacks=STACKS)
    assert report(dumps) == [
        "rank 1 called broadcast(root 0) as #3 of group 'world', where the others called flush",
        "group 'world': ranks 0, 1 and 2 have begun 3 collectives",
        "rank 0 (pid 4200 on node1) is not in a collective; its last call was flush, 96.5 s before the dump",
        "  dumped because: it was asked for",
        "rank 1 (pid 4200 on node1) is in broadcast(root 0), #3 of group 'world', for 97.0 s",
        "  at train.py:12 in read",
        "  dumped because: it was asked for",
        "rank 2 (pid 4200 on node1) failed in flush, 96.5 s before the dump",
        "  dumped because: it was asked for",
    ]


def test_a_rank_that_is_behind_or_missing_is_no_difference() -> None:
    ahead = call(3, "barrier", "runs")
    lines = report([dump(0, world=group(*COMMON, ahead)), dump(1, world=group(*COMMON))])
    assert lines[:4] == [
        "rank 1 has not begun #3 of group 'world', barrier, which rank 0 has begun",
        "there is no dump of rank 2; rank 0 did not end #3 of group 'world', barrier",
        "no rank differs from another in the collectives that can be compared",
        "group 'world': rank 0 has begun 3 collectives; rank 1 has begun 2; no dump of rank 2",
    ]


def test_a_rank_that_has_not_come_to_the_flush_is_named() -> None:
    ahead = call(3, "flush(mean) after 3 gradients", "failed")
    lines = report([dump(0, world=group(*COMMON, ahead)), dump(1, world=group(*COMMON))])
    assert lines[0] == "rank 1 has not begun #3 of group 'world', flush(mean) after 3 gradients, which rank 0 has begun"


def test_in_the_same_words_the_first_line_that_differs_is_told() -> None:
    def of(rank: int) -> Dump:
        names = ("'conv'", "'dense'", "'bias'") if rank == 0 else ("'conv'", "'bias'", "'dense'")
        bucket = call(1, "all_reduce(mean) 48 bytes", "failed", key=f"{rank}", arrays=names)
        return dump(rank, world=group(bucket, ranks=(0, 1)))

    assert report([of(0), of(1)])[1:3] == ["  rank 1: 'bias'", "  rank 0: 'dense'"]


def test_a_circle_over_groups_is_told() -> None:
    first = dump(0, a=group(call(1, "barrier", "runs"), ranks=(0, 1)), b=group(ranks=(0, 1)))
    second = dump(1, a=group(ranks=(0, 1)), b=group(call(1, "flush", "runs"), ranks=(0, 1)))
    assert report([first, second])[0].startswith("ranks wait for each other in a circle: rank 0 waits in barrier (#1 ")
    assert "circle" not in "".join(report([first]))  # a rank without a dump may be anywhere


def test_a_ranks_own_group_is_compared_with_nobodys() -> None:
    alone = [dump(rank, local=group(call(1, f"call of {rank}"), ranks=(0,))) for rank in range(2)]
    assert report(alone)[0] == "no rank differs from another in the collectives that can be compared"


def test_earlier_dumps_are_left_out_and_named() -> None:
    lines = report([dump(0, world=group(*COMMON))], [dump(0), dump(None)])
    assert lines[-2:] == [
        "gradsync-rank0.json is left out: there is a later dump of rank 0",
        "gradsync-rankNone.json is left out: it does not name its rank",
    ]


def test_a_rank_without_a_dump_is_named_with_the_collective_of_the_others() -> None:
    bucket = call(3, "all_reduce(mean) 48 bytes", "failed", arrays=("'a': float64[3]", "'b': float64[3]"))
    lines = report([dump(rank, world=group(*COMMON, bucket)) for rank in (0, 2)])
    assert lines[:3] == [
        "there is no dump of rank 1; ranks 0 and 2 did not end #3 of group 'world', all_reduce(mean) 48 bytes",
        "  with 'a': float64[3], 'b': float64[3]",
        "no rank differs from another in the collectives that can be compared",
    ]
