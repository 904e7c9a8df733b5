"""Predicts the time of NCCL's all-reduce by ring and by tree, and which of them NCCL takes.

The arithmetic and the constants are those of NCCL's own tuning, for GPUs of the Hopper generation with LL128, on hosts
with Intel processors. Left out: NVLS and CollNet, which need a switch that reduces, and what NCCL_ALGO, NCCL_PROTO or a
tuner plugin change.

Source: NVIDIA/nccl 2.20.3, src/graph/tuning.cc, functions ncclTopoTuneModel and ncclTopoGetAlgoTime.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from gradsync.errors import InvalidArgument


class Algorithm(enum.Enum):
    """How the ranks are connected."""

    RING = "ring"
    TREE = "tree"


class Protocol(enum.Enum):
    """How data and flags travel: in 8-byte words, in lines of 128 bytes, or in large chunks with fences."""

    LL = "LL"
    LL128 = "LL128"
    SIMPLE = "Simple"


@dataclass(frozen=True)
class Nodes:
    """Machines with GPUs, as NCCL's search for channels sees them.

    Attributes:
        ranks_per_node: GPUs in each machine.
        bus_gigabytes_per_second: of all channels together; the same inside and between, where the cards keep up.
        channels_inside, channels_between: how many, on one machine and on several.
    """

    ranks_per_node: int
    bus_gigabytes_per_second: float
    channels_inside: int
    channels_between: int


#: An assumption: eight H100 behind NVSwitch, a 400 Gb/s card for each. Their 18 NVLinks of 20.6 GB/s (src/graph/topo.h)
#: hold 12 channels of 30 or 8 of 45 GB/s (speeds that src/graph/search.cc tries), which NCCL then splits in two each.
H100_NODES = Nodes(ranks_per_node=8, bus_gigabytes_per_second=360.0, channels_inside=24, channels_between=16)


@dataclass(frozen=True)
class Prediction:
    """The predicted time of one algorithm and protocol.

    Attributes:
        seconds: all of it.
        latency_seconds: the part that does not depend on the bytes.
    """

    algorithm: Algorithm
    protocol: Protocol
    seconds: float
    latency_seconds: float

    def bus_bytes_per_second(self, ranks: int, size_bytes: float) -> float:
        """Returns the bus bandwidth: the least bytes that each rank must move, over the time. Source: nccl-tests."""
        return 2 * (ranks - 1) / ranks * size_bytes / self.seconds


_RING, _TREE = Algorithm.RING, Algorithm.TREE
_LL, _LL128, _SIMPLE = Protocol.LL, Protocol.LL128, Protocol.SIMPLE

# Microseconds: at all, and for each step over NVLink and over the network.
_BASE = {(_TREE, _LL): 6.8, (_TREE, _LL128): 14.0, (_TREE, _SIMPLE): 0.0,
         (_RING, _LL): 6.6, (_RING, _LL128): 14.0, (_RING, _SIMPLE): 8.4}  # fmt: skip
_NVLINK = {(_TREE, _LL): 0.6, (_TREE, _LL128): 1.25, (_TREE, _SIMPLE): 28.0,
           (_RING, _LL): 0.6, (_RING, _LL128): 1.9, (_RING, _SIMPLE): 3.4}  # fmt: skip
_NETWORK = {(_TREE, _LL): 5.0, (_TREE, _LL128): 8.5, (_TREE, _SIMPLE): 28.0,
            (_RING, _LL): 2.7, (_RING, _LL128): 4.0, (_RING, _SIMPLE): 14.0}  # fmt: skip
_POST_TO_NETWORK = {_LL: 1.0, _LL128: 1.0, _SIMPLE: 3.0}  # the least time of a step in a ring of several nodes
_PLATEAU = 1.4  # of a ring's latency, with Simple between nodes, once each channel has enough to do
_PLATEAU_BYTES = 64

# GB/s: on one node, on two, on more.
_MOST_LL = (87.7, 39.0, 20.4)
_MOST_OF_CHANNEL = {
    (_RING, _LL128): (36.7, 36.7, 36.7),
    (_TREE, _LL128): (36.7, 36.7, 29.0),
    (_TREE, _SIMPLE): (38.7, 41.4, 36.0),
}

# The part of its bandwidth that a tree reaches, by powers of two from 64 bytes.
_TREE_REACHES = {
    _LL: (1, 1, 1, 1, .9, .8, .7, .7, .7, .7, .6, .5, .4, .4, .5, .6, .7, .8, .9, 1, 1, 1, 1),
    _LL128: (1, 1, 1, 1, 1, .9, .8, .8, .8, .7, .6, .6, .6, .6, .6, .6, .8, .9, .9, .9, .9, 1, 1),
    _SIMPLE: (.9, .9, .9, .9, .9, .9, .9, .8, .7, .6, .6, .5, .5, .5, .5, .6, .7, .8, .7, .7, .8, .9, .9),
}  # fmt: skip


def predict(algorithm: Algorithm, protocol: Protocol, ranks: int, size_bytes: int, nodes: Nodes) -> Prediction:
    """Predicts the time of an all-reduce by one algorithm and protocol.

    Args:
        algorithm, protocol: the way.
        ranks: how many, from 2: fewer than a node has, or whole nodes.
        size_bytes: of the array.
        nodes: the machines.

    Raises:
        InvalidArgument: there are too few ranks, they do not fill the nodes, or there are no bytes.
    """
    count = _count_nodes(ranks, size_bytes, nodes)
    latency = _latency_microseconds(algorithm, protocol, ranks, count)
    bandwidth = _gigabytes_per_second(algorithm, protocol, ranks, count, nodes)
    if algorithm is _TREE:
        reached = _TREE_REACHES[protocol]
        power = max((size_bytes >> 6).bit_length() - 1, 0)
        bandwidth *= reached[power] if power < len(reached) else 1.0
    channels = nodes.channels_between if count > 1 else nodes.channels_inside
    if (algorithm, protocol) == (_RING, _SIMPLE) and count > 1 and size_bytes // (channels * ranks) >= _PLATEAU_BYTES:
        latency *= _PLATEAU
    return Prediction(algorithm, protocol, latency * 1e-6 + size_bytes / (bandwidth * 1e9), latency * 1e-6)


def fastest(ranks: int, size_bytes: int, nodes: Nodes, algorithm: Algorithm | None = None) -> Prediction:
    """Predicts the fastest way, which NCCL takes; of one algorithm if it is given. Args as `predict`."""
    algorithms = Algorithm if algorithm is None else (algorithm,)
    ways = [predict(way, protocol, ranks, size_bytes, nodes) for way in algorithms for protocol in Protocol]
    return min(ways, key=lambda prediction: prediction.seconds)


def _count_nodes(ranks: int, size_bytes: int, nodes: Nodes) -> int:
    if ranks < 2 or size_bytes < 1 or (ranks > nodes.ranks_per_node and ranks % nodes.ranks_per_node):
        raise InvalidArgument(
            f"a prediction needs 2 ranks or more, whole nodes of {nodes.ranks_per_node} beyond that many, and a byte, "
            f"got {ranks} ranks and {size_bytes} bytes"
        )
    return max(1, ranks // nodes.ranks_per_node)


def _latency_microseconds(algorithm: Algorithm, protocol: Protocol, ranks: int, count: int) -> float:
    way = algorithm, protocol
    inside, between = _NVLINK[way], _NETWORK[way]
    if algorithm is _TREE:
        return _BASE[way] + 2 * ((ranks // count - 1) * inside + (count.bit_length() - 1) * between)
    crossings = 2 * count if count > 1 else 0
    if count > 1:
        inside = max(inside, _POST_TO_NETWORK[protocol])
    return _BASE[way] + (2 * (ranks - 1) - crossings) * inside + crossings * between


def _gigabytes_per_second(algorithm: Algorithm, protocol: Protocol, ranks: int, count: int, nodes: Nodes) -> float:
    """Returns the bytes of the array by the time, without latency."""
    size = min(count, 3) - 1
    bus = nodes.bus_gigabytes_per_second
    channels = nodes.channels_between if count > 1 else nodes.channels_inside
    if algorithm is _TREE:
        bus = min(0.92 * bus, channels * _MOST_OF_CHANNEL[_TREE, _SIMPLE][size])
        if protocol is _LL:
            bus = min(bus / 3.8, _MOST_LL[size])
        elif protocol is _LL128:
            bus = min(bus * (7 / 9 if count == 1 else 120 / 128), channels * _MOST_OF_CHANNEL[_TREE, _LL128][size])
        return bus / 2
    if protocol is _LL:
        bus = min(_MOST_LL[size], bus / 4)
    elif protocol is _LL128:
        bus = min(0.92 * bus, channels * _MOST_OF_CHANNEL[_RING, _LL128][size])
    return bus * ranks / (2 * (ranks - 1))
