"""The same inputs through gradsync and through collectives that nobody here wrote: mpi4py's, and torch.distributed's.

What moves, whole numbers, and the smallest and largest of floats have to be equal bit for bit; of sums, means and
products the systems may round in another order. cross_check_cases.py says what each peer does not have.
"""

from __future__ import annotations

import fcntl
import sys
from pathlib import Path

import cross_check_launch as launch
import numpy as np
import pytest
from cross_check_cases import OPERATORS, Case, all_cases, input_of, is_offered

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


# -- The check itself ----------------------------------------------------------------------------------------


def test_every_case_has_a_peer_and_most_have_several():
    missing = {peer: {case.name for case in all_cases() if not is_offered(case, peer)} for peer in launch.PEERS}
    assert set.intersection(*missing.values()) == set()
    assert {name.split()[1] for name in missing["mpich"]} == {"bfloat16"}
    everything = {case.name for case in all_cases()}
    assert all(len(of_peer) < len(everything) / 2 for of_peer in missing.values())


def test_names_and_inputs_differ_from_case_to_case_and_rank_to_rank():
    cases = all_cases()
    assert len({case.name for case in cases}) == len(cases)
    inputs = [input_of(case, rank, 3).tobytes() for case in cases for rank in (0, 2) if case.dtype == "float32"]
    assert len(set(inputs)) == len(inputs)
    for case in cases:
        np.testing.assert_array_equal(input_of(case, 1, 3), input_of(case, 1, 3))


@pytest.mark.parametrize("dtype", OPERATORS)
def test_difference_is_seen(dtype: str):
    moved, summed = Case("all_gather", dtype), Case("all_reduce", dtype, OPERATORS[dtype][0])
    result = input_of(moved, 0, 2)
    for case in (moved, summed):
        assert difference(case, result, result.copy()) is None
        assert difference(case, result, result[:-1]) is not None
        assert difference(case, result, np.empty(result.shape, np.bytes_)) is not None
    other = result.copy()
    other[-1, -1] = ~other[-1, -1] if result.dtype.kind in "iub" else other[-1, -1] + 1
    assert difference(moved, result, other) == "not the same bits"
    if dtype != "bfloat16":
        assert difference(summed, result, other) is not None
    other.view(np.uint8)[0, 0] ^= 1  # the last bit of a significand may come out of another order
    assert difference(moved, result, other) == "not the same bits"


def test_peer_that_fails_is_told_with_what_it_printed(tmp_path: Path):
    with pytest.raises(launch.RunFailed, match=r"ended with \[3\]:\nno such library"):
        script = "import sys; print('no such library'); sys.exit(3)"
        launch.run_processes([[sys.executable, "-c", script]], {}, tmp_path)


HANGS = """
import fcntl, subprocess, sys
lock = open(sys.argv[1])
fcntl.flock(lock, fcntl.LOCK_EX)
child = "import time; print('begun', flush=True); time.sleep(60)"
subprocess.run([sys.executable, "-c", child], pass_fds=[lock.fileno()])
"""


def test_peer_that_hangs_is_ended_with_all_its_processes(tmp_path: Path):
    lock = tmp_path / "lock"
    lock.touch()
    with pytest.raises(launch.RunFailed, match=r"did not end within 6 s:\nbegun"):
        launch.run_processes([[sys.executable, "-c", HANGS, str(lock)]], {}, tmp_path, 6.0)
    with lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # waits until the last process that holds it has ended


def test_broken_mpi_is_a_reason_to_skip(tmp_path: Path):
    (tmp_path / "mpiexec").write_text("#!/bin/sh\necho 'libmpi.so.12: cannot open shared object file'\nexit 127\n")
    (tmp_path / "mpiexec").chmod(0o755)
    (tmp_path / "python").symlink_to(sys.executable)
    assert "libmpi.so.12: cannot open" in str(launch.Mpi("mpich", tmp_path).why_not(tmp_path))
    assert "there is no" in str(launch.Mpi("mpich", tmp_path / "nothing").why_not(tmp_path))
