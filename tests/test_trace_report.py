"""What gradsync trace says of dumps: differences and circles first, then progress, then each rank."""

from __future__ import annotations

from pathlib import Path

from gradsync.diagnostics.dump import Dump, DumpedCall, DumpedGroup
from gradsync.diagnostics.report import divergences, report, waits


def call(number: int, what: str, state: str = "ended", *, digest: int = 0, **facts: object) -> DumpedCall:
    ended = None if state == "runs" else 100.0 + number + 0.5
    return DumpedCall(number, digest or hash(what), what, state, 100.0 + number, ended, False, dict(facts))


def group(name: str, *calls: DumpedCall, ranks: tuple[int, ...] = (0, 1, 2)) -> DumpedGroup:
    return DumpedGroup(name, ranks, max((one.number for one in calls), default=0), calls)


def dump(rank: int | None, *groups: DumpedGroup, at: float = 200.0) -> Dump:
    by_name = {one.name: one for one in groups}
    path = Path(f"gradsync-rank{rank}.json")
    return Dump(
        path, rank, 4200, "node1", "boot", "it was asked for", "", "/usr/lib/gradsync/", at, at, by_name, (), (), (), 0
    )


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
    dumps = [dump(rank, group("world", *COMMON, calls[rank])) for rank in range(3)]
    dumps[1] = dumps[1]._replace(stacks=STACKS)
    assert report(dumps) == [
        "rank 1 called broadcast(root 0) as #3 of group 'world', where the others called flush",
        "group 'world': ranks 0, 1 and 2 have begun 3 collectives; compared: #1 to #3",
        "rank 0 (pid 4200 on node1) is not in a collective; its last one was flush, 96.5 s before the dump",
        "  dumped because: it was asked for",
        "rank 1 (pid 4200 on node1) is in broadcast(root 0), #3 of group 'world', for 97.0 s",
        "  at train.py:12 in read",
        "  dumped because: it was asked for",
        "rank 2 (pid 4200 on node1) failed in flush, 96.5 s before the dump",
        "  dumped because: it was asked for",
    ]


def test_a_rank_that_is_behind_or_missing_is_no_difference() -> None:
    ahead = call(3, "barrier", "runs")
    lines = report([dump(0, group("world", *COMMON, ahead)), dump(1, group("world", *COMMON))])
    assert lines[:4] == [
        "rank 1 has not begun #3 of group 'world', barrier, which rank 0 has begun",
        "there is no dump of rank 2; rank 0 did not end #3 of group 'world', barrier",
        "no rank differs from another in the collectives that can be compared",
        "group 'world': rank 0 has begun 3 collectives; rank 1 has begun 2; compared: #1 to #2; no dump of rank 2",
    ]


def test_a_rank_that_has_not_come_to_the_flush_is_named() -> None:
    """A flush has the number of the gradients where a bucket has their names."""
    ahead = call(3, "flush(mean) after 3 gradients", "failed", gradients=3)
    lines = report([dump(0, group("world", *COMMON, ahead)), dump(1, group("world", *COMMON))])
    assert lines[0] == "rank 1 has not begun #3 of group 'world', flush(mean) after 3 gradients, which rank 0 has begun"


def test_what_is_forgotten_is_said() -> None:
    late = [call(number, "barrier") for number in range(70, 75)]
    lines = report([dump(0, group("world", *late)), dump(1, group("world", *COMMON, *late[:2]))])
    assert "compared: #70 to #71, earlier collectives are not remembered" in "".join(lines)
    lines = report([dump(0, group("world", *late)), dump(1, group("world", *COMMON))])
    assert "; no two ranks remember the same collective" in "".join(lines)


def test_in_the_same_words_the_first_line_that_differs_is_told() -> None:
    def of(rank: int) -> Dump:
        names = ["'conv'", "'dense'", "'bias'"] if rank == 0 else ["'conv'", "'bias'", "'dense'"]
        bucket = call(1, "all_reduce(mean) of bucket 0", "failed", digest=rank + 1, description=["a bucket", *names])
        return dump(rank, group("world", bucket, ranks=(0, 1)))

    assert report([of(0), of(1)])[1:3] == ["  rank 1: 'bias'", "  rank 0: 'dense'"]


def test_a_circle_over_groups_is_told() -> None:
    first = dump(0, group("a", call(1, "barrier", "runs"), ranks=(0, 1)), group("b", ranks=(0, 1)))
    second = dump(1, group("a", ranks=(0, 1)), group("b", call(1, "flush", "runs"), ranks=(0, 1)))
    assert report([first, second])[0].startswith("ranks wait for each other in a circle: rank 0 waits in barrier (#1 ")
    assert [wait.for_ranks for wait in waits([first, second])] == [(1,), (0,)]
    assert [wait.for_ranks for wait in waits([first])] == [()]  # who has left no dump may be anywhere


def test_a_ranks_own_group_is_compared_with_nobodys() -> None:
    alone = [dump(rank, group("local", call(1, f"call of {rank}"), ranks=(0,))) for rank in range(2)]
    assert divergences(alone) == []
    assert report(alone)[0] == "no rank differs from another in the collectives that can be compared"


def test_earlier_dumps_are_left_out_and_named() -> None:
    lines = report([dump(0, group("world", *COMMON))], [dump(0), dump(None)])
    assert lines[-2:] == [
        "gradsync-rank0.json is left out: there is a later dump of rank 0",
        "gradsync-rankNone.json is left out: it does not name its rank",
    ]


def test_a_rank_without_a_dump_is_named_with_the_collective_of_the_others() -> None:
    bucket = call(3, "all_reduce(mean) of bucket 0 [a, 1 more]", "failed", bucket=0, gradients=["a", "b"])
    lines = report([dump(rank, group("world", *COMMON, bucket)) for rank in (0, 2)])
    assert lines[:3] == [
        "there is no dump of rank 1; ranks 0 and 2 did not end #3 of group 'world', "
        "all_reduce(mean) of bucket 0 [a, 1 more]",
        "  gradients: a, b",
        "no rank differs from another in the collectives that can be compared",
    ]
