"""Changes one thing in src at a time, and tells which changes no test notices: what they break is not protected.

    python tests/mutants.py --count 150 --seed 38             # hours
    python tests/mutants.py --count 5 --tests tests/bucketing src/gradsync/bucketing

cosmic-ray makes the mutants. coverage says which test files run the changed line, in the processes that tests start,
too, but not in one that is killed. Only those files run, the fastest first, until one fails. Mutants are made in src
itself, which must be as it was committed; each is taken back. Both tools come with the dependency group dev. What
coverage has found stays in build/mutants: delete that folder when tests or src have changed.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names
from coverage import CoverageData

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "build" / "mutants"
# A rank ends by a signal or by os._exit, and is forked or started anew.
_SETTINGS = """[run]
source_pkgs = gradsync
parallel = true
sigterm = true
concurrency = multiprocessing, thread
patch = subprocess, fork, _exit, execv
data_file = {folder}/data
"""
_PYTEST = ["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not slow and not gpu"]
_GREEN = (0, 5)  # 5: of this file, -m chooses no test


def run(words: list[str], limit: float | None = None) -> int | None:
    """The exit code; None where it took too long."""
    command = [sys.executable, *words]
    process = subprocess.Popen(
        command, cwd=ROOT, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT
    )
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)  # launchers end their ranks
        with suppress(subprocess.TimeoutExpired):
            process.wait(5)
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def measure(test_file: Path) -> tuple[float, CoverageData] | None:
    """How long a test file takes without a mutant, and what it runs; None where it fails."""
    folder = KEPT / str(test_file.relative_to(ROOT)).replace("/", "+")
    seconds, settings = folder / "seconds.json", folder / "settings"
    if not seconds.exists():
        folder.mkdir(parents=True, exist_ok=True)
        settings.write_text(_SETTINGS.format(folder=folder))
        began = time.monotonic()
        code = run(["-m", "coverage", "run", f"--rcfile={settings}", *_PYTEST, str(test_file)])
        run(["-m", "coverage", "combine", "-q", f"--rcfile={settings}"])
        seconds.write_text(json.dumps(time.monotonic() - began if code in _GREEN else None))
    took = json.loads(seconds.read_text())
    if took is None:
        print(f"{test_file} fails without a mutant, and is left out")
        return None
    data = CoverageData(str(folder / "data"))
    data.read()
    return took, data


def statement(tree: ast.Module, line: int) -> ast.stmt | None:
    """The innermost statement on this line; None outside of functions, and of a def and of what only describes."""
    around = [n for n in ast.walk(tree) if isinstance(n, ast.stmt) and n.lineno <= line <= (n.end_lineno or 0)]
    function = next((n.name for n in around if isinstance(n, ast.FunctionDef)), "__repr__")
    is_code = function not in ("__repr__", "__str__") and not isinstance(around[-1], ast.FunctionDef | ast.AnnAssign)
    return around[-1] if is_code else None


def draw(sources: list[Path], seed: int) -> list[tuple[Path, int, str, int]]:
    """Mutants in an order drawn by lot: file, line, operator, and how many of its positions in the file come before."""
    by_line = defaultdict(list)  # of each line one is drawn: + alone may become ten others
    for path in sources:
        nodes = list(ast_nodes(get_ast(path.read_text())))
        for name in sorted(name for name in operator_names() if "Variable" not in name):
            operator = get_operator(name)()
            positions = [at for node in nodes for at in operator.mutation_positions(node)]
            for i, (start, _) in enumerate(positions):
                by_line[path, start[0]].append((path, start[0], name, i))
    chance = random.Random(seed)
    drawn = [chance.choice(mutants) for mutants in by_line.values()]
    chance.shuffle(drawn)
    return drawn


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--tests", default="tests", help="the folder of the tests")
    parser.add_argument("sources", nargs="*", default=["src"], help="files and folders")
    options = parser.parse_args()
    if subprocess.run(["git", "diff", "--quiet", "HEAD", "--", "src"], cwd=ROOT, check=False).returncode:
        parser.error("src is not as it was committed")
    print(f"seed {options.seed}")
    sources = sorted(p for name in options.sources for p in [ROOT / name, *(ROOT / name).rglob("*.py")] if p.is_file())
    tests = {path: found for path in sorted((ROOT / options.tests).rglob("test_*.py")) if (found := measure(path))}
    ran = survived = 0
    for path, line, name, occurrence in draw(sources, options.seed):
        source = path.read_text()
        tree, mutant = ast.parse(source), mutate_code(source, get_operator(name)(), occurrence)
        place = statement(tree, line)
        if place is None or ast.dump(tree) == ast.dump(ast.parse(mutant)):
            continue
        lines = {line, place.lineno}
        covering = sorted((took, t) for t, (took, data) in tests.items() if lines & {*(data.lines(str(path)) or [])})
        path.write_text(mutant)
        try:
            by = next((t for took, t in covering if run([*_PYTEST, str(t)], 3 * took + 20) not in _GREEN), None)
        finally:
            path.write_text(source)
        ran += 1
        survived += by is None
        end = (
            f"noticed by {by.relative_to(ROOT)}" if by else f"NOT NOTICED by the {len(covering)} test files that run it"
        )
        print(f"{path.relative_to(ROOT)}:{line} {name}: {end}", flush=True)
        if by is None:
            print(
                *difflib.unified_diff(source.splitlines(), mutant.splitlines(), n=2, lineterm=""), sep="\n", flush=True
            )
        if ran == options.count:
            break
    print(f"{survived} of {ran} mutants are not noticed (seed {options.seed})")
    return survived > 0


if __name__ == "__main__":
    sys.exit(main())
