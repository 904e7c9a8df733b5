"""The same inputs through gradsync and through collectives that nobody here wrote: mpi4py's, and torch.distributed's.

What moves, whole numbers, and the smallest and largest of floats have to be equal bit for bit; of sums, means and
products the systems may round in another order. cross_check_cases.py says what each peer does not have.
"""

from __future__ import annotations

import sys

import cross_check_launch as launch
import numpy as np
import pytest
from cross_check_cases import Case, all_cases, is_offered

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="gradsync's ranks share memory on Linux")

WORLD_SIZES = (2, 3)
FORMS = ("gradsync", "gradsync, asynchronous")
# Bits of the significand, the leading one too.
PRECISION = {"float16": 11, "bfloat16": 8, "float32": 24, "float64": 53, "complex64": 24, "complex128": 53}
# Inputs are below 2 in each part, so no result of three ranks is larger; each system rounds a few times on the way.
LARGEST = {"sum": 6.0, "mean": 2.0, "prod": 8.0}
LARGEST_OF_COMPLEX = {"sum": 9.0, "mean": 3.0, "prod": 23.0}
ROUNDINGS = 4


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], list[dict[str, np.ndarray]]]:
    """The results of gradsync by form and world size, and therein by rank and case."""
    results = {}
    for form in FORMS:
        for world_size in WORLD_SIZES:
            folder = tmp_path_factory.mktemp("gradsync")
            launch.run_gradsync(form, world_size, folder)
            results[form, world_size] = launch.read_results(world_size, folder)
    return results


@pytest.mark.timeout(330)  # each of the runs has a limit of its own
@pytest.mark.parametrize("peer", launch.PEERS)
def test_collectives_give_what_those_of_a_peer_give(ours, peer: str, tmp_path_factory: pytest.TempPathFactory):
    reason = launch.PEERS[peer].why_not(tmp_path_factory.mktemp("probe"))
    if reason:
        pytest.skip(reason)
    for world_size in WORLD_SIZES:
        folder = tmp_path_factory.mktemp("peer")
        launch.PEERS[peer].run(world_size, folder)
        theirs = launch.read_results(world_size, folder)
        for form in FORMS:
            compare(peer, world_size, ours[form, world_size], theirs)


def compare(peer: str, world_size: int, ours: list[dict[str, np.ndarray]], theirs: list[dict[str, np.ndarray]]):
    cases = {case.name: case for case in all_cases() if is_offered(case, peer)}
    for rank in range(world_size):
        got = {name: result for name, result in ours[rank].items() if name in cases}
        assert got.keys() == theirs[rank].keys()
        for name, result in got.items():
            trouble = difference(cases[name], result, theirs[rank][name])
            assert trouble is None, f"{name}, rank {rank} of {world_size}, {peer}: {trouble}"
    # A collective has results somewhere, and most have them on every rank.
    assert set().union(*theirs) == set(cases)


def difference(case: Case, ours: np.ndarray, theirs: np.ndarray) -> str | None:
    """Returns in what two results differ more than they may."""
    if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
        return f"{ours.dtype}{ours.shape} in place of {theirs.dtype}{theirs.shape}"
    if case.is_exact:
        return None if ours.tobytes() == theirs.tobytes() else "not the same bits"
    largest = (LARGEST_OF_COMPLEX if ours.dtype.kind == "c" else LARGEST)[case.op]
    limit = ROUNDINGS * largest * 2.0 ** -PRECISION[case.dtype]
    furthest = np.abs(values(case, ours) - values(case, theirs)).max(initial=0.0)
    return None if furthest <= limit else f"they differ by {furthest:g}, more than {limit:g}"


def values(case: Case, result: np.ndarray) -> np.ndarray:
    """Returns the numbers of a result, of bfloat16 made from its bits."""
    if case.dtype == "bfloat16":
        return (result.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return result.astype(np.complex128)
