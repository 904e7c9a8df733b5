"""NCCL's tuning as a model, against its arithmetic worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradsync.errors import InvalidArgument
from gradsync.nccl_cost_model import H100_NODES, Algorithm, Protocol, fastest, predict

BUCKET = 10 * 1024**2


@pytest.mark.parametrize(
    ("algorithm", "protocol", "ranks", "latency_us", "gigabytes_per_second"),
    [
        (Algorithm.RING, Protocol.SIMPLE, 8, 8.4 + 14 * 3.4, 360 * 8 / 14),
        (Algorithm.RING, Protocol.LL128, 8, 14 + 14 * 1.9, 0.92 * 360 * 8 / 14),
        (Algorithm.RING, Protocol.LL, 8, 6.6 + 14 * 0.6, 87.7 * 8 / 14),
        (Algorithm.TREE, Protocol.LL128, 8, 14 + 2 * 7 * 1.25, 0.92 * 360 * 7 / 9 / 2 * 0.9),
        (Algorithm.RING, Protocol.SIMPLE, 64, 1.4 * (8.4 + 110 * 3.4 + 16 * 14), 360 * 64 / 126),
        (Algorithm.RING, Protocol.LL, 64, 6.6 + 110 * 1.0 + 16 * 2.7, 20.4 * 64 / 126),
        (Algorithm.TREE, Protocol.LL128, 64, 14 + 2 * (7 * 1.25 + 3 * 8.5), 0.92 * 360 * 120 / 128 / 2 * 0.9),
        (Algorithm.TREE, Protocol.SIMPLE, 1024, 2 * (7 * 28 + 7 * 28), 0.92 * 360 / 2 * 0.8),
        (Algorithm.TREE, Protocol.LL, 16, 6.8 + 2 * (7 * 0.6 + 5), 39 / 2 * 0.8),
    ],
)
def test_ten_megabytes_by_hand(algorithm, protocol, ranks: int, latency_us: float, gigabytes_per_second: float) -> None:
    found = predict(algorithm, protocol, ranks, BUCKET, H100_NODES)
    assert found.latency_seconds == pytest.approx(latency_us * 1e-6)
    assert found.seconds == pytest.approx(latency_us * 1e-6 + BUCKET / (gigabytes_per_second * 1e9))


def test_rings_win_on_one_node_and_trees_across_many() -> None:
    assert fastest(8, BUCKET, H100_NODES).algorithm is Algorithm.RING
    assert [fastest(ranks, BUCKET, H100_NODES).algorithm for ranks in (64, 1024)] == [Algorithm.TREE] * 2
    assert fastest(64, 2**32, H100_NODES).algorithm is Algorithm.RING


def test_small_messages_take_the_protocol_of_least_latency() -> None:
    assert fastest(8, 8, H100_NODES).protocol is Protocol.LL
    assert fastest(8, 2**30, H100_NODES).protocol is Protocol.SIMPLE


@given(st.sampled_from([2, 4, 8, 16, 64, 1024]), st.integers(1, 2**40))
def test_the_fastest_way_is_the_fastest(ranks: int, size: int) -> None:
    chosen = fastest(ranks, size, H100_NODES)
    assert chosen.seconds == min(fastest(ranks, size, H100_NODES, a).seconds for a in Algorithm)
    assert 0 < chosen.latency_seconds < chosen.seconds
    assert chosen.bus_bytes_per_second(ranks, size) < 2 * 360e9


@given(st.sampled_from([8, 64, 1024]), st.integers(0, 39), st.sampled_from(list(Protocol)))
def test_rings_take_longer_for_more_bytes(ranks: int, power: int, protocol: Protocol) -> None:
    small, large = (predict(Algorithm.RING, protocol, ranks, 2**p, H100_NODES) for p in (power, power + 1))
    assert small.seconds < large.seconds


@pytest.mark.parametrize(("ranks", "size"), [(1, 8), (12, 8), (8, 0)])
def test_what_cannot_be_predicted_is_refused(ranks: int, size: int) -> None:
    with pytest.raises(InvalidArgument, match="whole nodes of 8"):
        predict(Algorithm.RING, Protocol.LL, ranks, size, H100_NODES)
