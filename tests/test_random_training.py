"""Random training programs, some with a mistake on one rank: right numbers or typed errors on all ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from contract import IS_EVERYWHERE
from random_training import ALONE, CONSTRUCTS, PLANTS, Runner, draw, report, violations

pytestmark = pytest.mark.timeout(400)

#: Backend, ranks and programs: in `python tests/random_training.py` as here.
SHARES = [("shm", 2, 1000), ("shm", 3, 500), ("stand-in", 2, 300), ("local", 1, 200)]
#: Disagreements that once gave wrong numbers without a word: a few programs more have each.
ONCE_SILENT = ("write in flight", "crosswise")


Runners = dict[str, Runner]


@pytest.fixture(scope="module")
def runners() -> Iterator[Runners]:
    """One for each backend: the start of its process, which imports everything, takes longer than ten programs."""
    made: Runners = {}
    yield made
    for runner in made.values():
        runner.close()


@pytest.mark.parametrize(("backend", "ranks", "count"), [(b, n, count // 100) for b, n, count in SHARES])
def test_programs_end_in_right_numbers_or_in_typed_errors(
    runners: Runners, backend: str, ranks: int, count: int
) -> None:
    run_and_expect_no_violation(runners, backend, ranks, [(seed, PLANTS) for seed in range(count)])


@pytest.mark.parametrize(("backend", "ranks"), [(b, n) for b, n, _ in SHARES])
@pytest.mark.parametrize("kind", ONCE_SILENT)
def test_programs_with_a_disagreement_that_was_once_silent(
    runners: Runners, backend: str, ranks: int, kind: str
) -> None:
    if ranks == 1 and kind not in ALONE:
        pytest.skip("one rank agrees with itself")
    seeds = range(1000, 1003 if IS_EVERYWHERE else 1001)
    run_and_expect_no_violation(runners, backend, ranks, [(seed, (kind,)) for seed in seeds])


def run_and_expect_no_violation(
    runners: Runners, backend: str, ranks: int, seeds: list[tuple[int, tuple[str, ...]]]
) -> None:
    if backend not in runners:
        runners[backend] = Runner(backend, lanes=1)
    for program, endings in runners[backend].run_all([draw(seed, backend, ranks, kinds) for seed, kinds in seeds]):
        found = violations(program, endings)
        assert not found, report(program, endings, found)


def test_every_construct_and_every_disagreement_is_drawn_often_enough() -> None:
    programs = [draw(seed, backend, ranks) for backend, ranks, count in SHARES for seed in range(0, count, 4)]
    constructs = Counter(name for program in programs for name in program.constructs())
    planted = Counter(kind for program in programs for kind in program.kinds)
    assert min(constructs[name] for name in CONSTRUCTS) >= 0.1 * len(programs), constructs
    assert min(planted[kind] for kind in PLANTS) >= 0.04 * len(programs), planted  # of 2,000 programs each 100 times
    assert sum(not program.fatal for program in programs) >= 0.4 * len(programs)
