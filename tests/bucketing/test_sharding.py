"""shard_indices: every sample once, whatever the numbers, and the same order everywhere."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gradsync as gs

PINNED = [0, 6, 2, 1, 3, 7, 4, 9, 8, 5]


def shards_of(comm, examples):
    """This rank's shard of each example, for each rule of uneven=."""
    return [
        [gs.shard_indices(uneven=uneven, **example).tolist() for uneven in ("keep", "drop", "pad")]
        for example in examples
    ]


examples = st.fixed_dictionaries(
    {
        "n": st.integers(0, 200),
        "epoch": st.integers(0, 2**40),
        "seed": st.integers(0, 2**70),
        "shuffle": st.booleans(),
    }
)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_sample_is_dealt_out(run_on_ranks, ranks):
    @settings(max_examples=20)
    @given(st.lists(examples, min_size=5, max_size=10))
    def run(several):
        for example, *by_rank in zip(several, *run_on_ranks(ranks, shards_of, several), strict=True):
            kept, dropped, padded = zip(*by_rank, strict=True)
            n = example["n"]
            assert sorted(chain(*kept)) == list(range(n))
            sizes = [len(shard) for shard in kept]
            assert sizes == sorted(sizes, reverse=True)
            assert sizes[0] - sizes[-1] <= 1
            assert list(dropped) == [shard[: n // ranks] for shard in kept]
            assert {len(shard) for shard in padded} == {-(-n // ranks)}
            assert set(chain(*padded)) == set(range(n))
            assert all(whole[: len(shard)] == shard for shard, whole in zip(kept, padded, strict=True))

    run()


def dealt(comm, n, shards, uneven):
    mine = gs.shard_indices(n, 3, shards=shards, uneven=uneven)
    return mine.tolist(), len(range(comm.rank, shards, comm.world_size))


@pytest.mark.parametrize(("n", "shards"), [(96, 8), (100, 8), (5, 8), (0, 4), (37, 3), (50, 48)])
@pytest.mark.parametrize("uneven", ["keep", "drop", "pad"])
def test_a_step_has_the_same_samples_on_any_number_of_ranks(run_on_ranks, n, shards, uneven):
    """Each rank takes one sample of each of its shards in a step; here a step on 3 ranks may follow one on 2."""
    steps_by_ranks = []
    for ranks in (1, 2, 3):
        by_rank = run_on_ranks(ranks, dealt, n, shards, uneven)
        count = max(-(-len(mine) // each) for mine, each in by_rank)
        steps_by_ranks.append(
            [sorted(chain(*(mine[each * step :][:each] for mine, each in by_rank))) for step in range(count)]
        )
    one_process = steps_by_ranks[0]
    assert steps_by_ranks == [one_process] * 3
    assert {len(step) for step in one_process[:-1]} <= {shards}
    if uneven == "keep":
        assert sorted(chain(*one_process)) == list(range(n))


@pytest.mark.ranks(3)
def test_shards_are_dealt_in_turn(comm):
    mine = gs.shard_indices(16, shuffle=False, shards=8).tolist()
    assert mine == [[0, 3, 6, 8, 11, 14], [1, 4, 7, 9, 12, 15], [2, 5, 10, 13]][comm.rank]
    assert gs.shard_indices(16, shards=3).tolist() == gs.shard_indices(16).tolist()
    with pytest.raises(gs.InvalidArgument, match="shard_indices on 3 ranks needs shards to be an integer from 3 .*2$"):
        gs.shard_indices(16, shards=2)


@pytest.mark.ranks(3)
def test_padding_repeats_the_order_from_its_beginning(comm):
    assert gs.shard_indices(1, shuffle=False).tolist() == [0]
    assert gs.shard_indices(5, shuffle=False).tolist() == [[0, 3], [1, 4], [2, 0]][comm.rank]
    assert gs.shard_indices(5, shuffle=False, uneven="keep").tolist() == [[0, 3], [1, 4], [2]][comm.rank]
    group = comm.split(comm.rank)
    assert gs.shard_indices(3, shuffle=False, communicator=group).tolist() == [0, 1, 2]
    group.close()


def test_the_order_is_the_same_in_every_version_and_another_in_each_epoch():
    """What a training has seen must not depend on who takes it up again; no process group is needed."""
    assert not gs.is_initialized()
    assert gs.shard_indices(10, seed=3, epoch=1).tolist() == PINNED
    others = [gs.shard_indices(10, seed=3, epoch=2), gs.shard_indices(10, seed=4, epoch=1)]
    assert len({tuple(order) for order in (PINNED, *others, range(10))}) == 4
    first = [gs.shard_indices(8, epoch)[0] for epoch in range(4000)]
    assert (abs(np.bincount(first, minlength=8) - 500) < 110).all()  # five standard deviations
    assert gs.shard_indices(4).dtype == np.int64


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        *[((n,), {}) for n in (-1, 2.0, True, 2**63)],
        ((2**62,), {"shuffle": False}),
        ((4, -1), {}),
        ((4, 0, "x"), {}),
        ((4,), {"uneven": "wrap"}),
        *[((4,), {"shards": shards}) for shards in (0, 8.0, True, 2**63)],
        ((4,), {"communicator": 3}),
    ],
)
def test_wrong_arguments_are_refused(arguments, options):
    with pytest.raises(gs.InvalidArgument):
        gs.shard_indices(*arguments, **options)


@pytest.mark.ranks(2)
def test_before_the_process_group_begins_no_rank_gets_all_samples(rank):
    with pytest.raises(gs.InvalidArgument, match=rf"rank {rank}/2: shard_indices"):
        gs.shard_indices(10)
    with gs.init_process_group("shm"):
        assert len(gs.shard_indices(10)) == 5
