"""Plants defects in a copy of the library, one at a time, and sees whether the tests find them.

    python tests/prove/planted.py draw --seed 28 --each 3 --suffix d    # adds three of each room to planted_drawn.json
    python tests/prove/planted.py lines --python .venv-3.13/bin/python    # which test runs which line; ten minutes
    python tests/prove/planted.py run [--shard 0/2] [--room bucketing] [--only NAME] [--limit 5] [--tests GLOB]
    python tests/prove/planted.py table
    python tests/prove/planted.py check    # which of them the source has outgrown: change or draw these anew

Defects are of two kinds: drawn from the source by a seed (planted_drawn.json), and written by hand, at least one for
each row of the list of failures (planted_by_hand.json). A defect is a replacement of one piece of text in one file. The
run copies the tree, replaces the text, and runs the tests of the defect's room first, then all others, up to the first
failure. Where `lines` has been run on the source as it is, only the tests that run the defect's lines are run, those
of its room first: to the others nothing has changed. Found means that a test's assertion on behaviour failed, and
failed again when that test was repeated (up to three times): a busy machine is no defect. A failure of the tests in
TEXT_TESTS, which compare the source or its pages as text, does not count, nor does an error while tests are collected,
nor a test that pytest ended at its time limit, or whose process died. Where the limit of the whole run ends it, the
result says so: it is neither found nor missed, and runs again.

Results are appended to benchmarks/results/planted.jsonl, a line for each run of a defect, so that a run that was
interrupted goes on where it stopped. A defect that was missed is run again, once it has a test.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
SOURCE = Path("src/gradsync")
HERE = Path(__file__).resolve().parent
DRAWN = HERE / "planted_drawn.json"
BY_HAND = HERE / "planted_by_hand.json"
RESULTS = ROOT / "benchmarks" / "results" / "planted.jsonl"
LINES_RUN = ROOT / "build" / "lines_run"
RECORDER = HERE / "tools" / "lines_run"

#: Tests that read the source or the pages as text: they find a change, not a defect.
TEXT_TESTS = ("test_imports", "test_docstrings", "test_public_api", "test_pages", "test_readme", "test_packaging")

#: Folders and files of tests that are run first for a defect in a room.
TESTS_OF_ROOM = {
    "bucketing": ["tests/bucketing", "tests/test_random_training.py"],
    "communicators": ["tests/communicators", "tests/bucketing"],
    "shared_memory": ["tests/communicators/test_[!mn]*.py"],
    "nccl": ["tests/communicators/test_*nccl*.py", "tests/communicators/test_stream_plan.py"],
    "mpi": ["tests/communicators/test_mpi*.py", "tests/prove/mpi"],
    "rendezvous": ["tests/rendezvous", "tests/launching"],
    "launching": ["tests/launching"],
    "diagnostics": ["tests/test_dump*.py", "tests/test_chrome_trace.py", "tests/test_flight_recorder.py"],
    "doctor": ["tests/doctor", "tests/test_golden.py"],
    "bench": ["tests/bench", "tests/test_golden.py"],
    "adapters": ["tests/test_arguments.py"],
    "top": ["tests/test_*.py"],
}
REPEATS = 3
_USAGE_ERROR, _NO_TESTS = 4, 5  # exit codes of pytest

#: Calls whose loss is a wait that is missing.
_WAITS = frozenset({"wait", "join", "result", "acquire", "poll", "select", "order", "barrier", "await_end"})
_NOT_DEFECTS = frozenset({"debug", "info", "warning", "cast", "TypeVar", "overload"})


class Defect(NamedTuple):
    """One replacement.

    Attributes:
        name: tells it apart, e.g. "bucketing-17".
        room: the folder under src/gradsync, or "top"; of a backend its own folder.
        file: path from the root of the repository.
        line, column: the first place from which the replaced text is searched; columns count from 0.
        kind: what was done: drop, negate, off by one, swap, drop raise, drop wait; or the row that it breaks.
        old, new: the text, and what takes its place.
        reason: where the defect changes nothing that a user could see: why. It stays in the count. Where the code has
            gone since, with nothing in its place, the reason says "gone since".
    """

    name: str
    room: str
    file: str
    line: int
    kind: str
    old: str
    new: str
    column: int = 0
    reason: str = ""

    @property
    def has_gone(self) -> bool:
        return "gone since" in self.reason


# -- Drawing ---------------------------------------------------------------------------------------------------------


def room_of(path: Path) -> str:
    """Returns the room of a file under src/gradsync: the innermost folder that has tests of its own."""
    folders = path.relative_to(SOURCE).parts[:-1]
    return next((folder for folder in reversed(folders) if folder in TESTS_OF_ROOM), "top")


class _Finder(ast.NodeVisitor):
    """Collects the places of a file where a defect can be planted: kind, node, new text."""

    def __init__(self, text: str) -> None:
        self.found: list[tuple[str, Any, str]] = []
        self._lines = [line.encode() for line in text.splitlines(keepends=True)]
        self._depth = 0  # of functions: code outside of these runs at import

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._depth += 1
        for statement in node.body:
            self.visit(statement)
        self._depth -= 1

    visit_AsyncFunctionDef = visit_FunctionDef  # type: ignore[assignment]  # noqa: N815

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def generic_visit(self, node: ast.AST) -> None:
        if self._depth:
            self.found += [(kind, node, new) for kind, new in self._defects_of(node)]
        super().generic_visit(node)

    def source(self, node: Any) -> str:
        """Returns the text of a node; ast.get_source_segment would split the whole file for each."""
        lines = self._lines[node.lineno - 1 : node.end_lineno]
        lines[-1] = lines[-1][: node.end_col_offset]
        lines[0] = lines[0][node.col_offset :]
        return b"".join(lines).decode()

    def _defects_of(self, node: ast.AST) -> Iterator[tuple[str, str]]:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            name = _called(node.value)
            if name not in _NOT_DEFECTS:
                yield ("drop wait" if name in _WAITS else "drop"), "pass"
        elif isinstance(node, ast.AugAssign) or (
            isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute)
        ):
            yield "drop", "pass"
        elif isinstance(node, ast.Raise) and node.exc is not None:
            yield "drop raise", "pass"
        elif isinstance(node, (ast.If, ast.While)) and self.source(node.test):
            return  # its test is negated below, as an expression
        elif isinstance(node, ast.Compare) and len(node.ops) == 1:
            yield from self._compared(node)
        elif isinstance(node, ast.BoolOp):
            other = " or " if isinstance(node.op, ast.And) else " and "
            yield "negate", "(" + other.join(f"({self.source(value)})" for value in node.values) + ")"
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield "negate", f"({self.source(node.operand)})"
        elif isinstance(node, ast.Constant) and type(node.value) is int and node.value < 1000:
            yield "off by one", str(node.value + 1)
        elif isinstance(node, ast.Call) and len(node.args) >= 2 and not any(map(_is_starred, node.args[:2])):
            first, second = map(self.source, node.args[:2])
            if first != second and _called(node) not in _NOT_DEFECTS:
                rest = [self.source(argument) for argument in [*node.args[2:], *node.keywords]]
                yield "swap", f"{self.source(node.func)}({', '.join([second, first, *rest])})"

    def _compared(self, node: ast.Compare) -> Iterator[tuple[str, str]]:
        left, right = self.source(node.left), self.source(node.comparators[0])
        shifted = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}.get(type(node.ops[0]))
        if shifted is not None:
            yield "off by one", f"({left} {shifted} {right})"
        opposite = {
            ast.Eq: "!=", ast.NotEq: "==", ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
            ast.Lt: ">=", ast.LtE: ">", ast.Gt: "<=", ast.GtE: "<",
        }  # fmt: skip
        yield "negate", f"({left} {opposite[type(node.ops[0])]} {right})"


def _called(call: ast.Call) -> str:
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def _is_starred(node: ast.AST) -> bool:
    return isinstance(node, ast.Starred)


def candidates() -> dict[str, dict[str, list[Defect]]]:
    """Returns every defect that can be drawn, by room and kind; unnamed."""
    found: dict[str, dict[str, list[Defect]]] = {}
    for path in sorted((ROOT / SOURCE).rglob("*.py")):
        file = path.relative_to(ROOT)
        text = path.read_text()
        lines = text.splitlines()
        finder = _Finder(text)
        finder.visit(ast.parse(text))
        for kind, node, new in finder.found:
            old = finder.source(node)
            column = len(lines[node.lineno - 1].encode()[: node.col_offset].decode())
            defect = Defect("", room_of(file), str(file), node.lineno, kind, old, new, column)
            if old:
                found.setdefault(defect.room, {}).setdefault(kind, []).append(defect)
    return found


def _parses(defect: Defect) -> bool:
    try:
        ast.parse(replaced((ROOT / defect.file).read_text(), defect))
    except SyntaxError:
        return False
    return True


def draw(seed: int, each: int, suffix: str, rooms: Sequence[str] = ()) -> list[Defect]:
    """Draws as many defects for each room, the kinds within a room in turn; none that was drawn before."""
    random_source = random.Random(seed)
    before = {(defect.file, defect.old, defect.new) for defect in load()}
    drawn: list[Defect] = []
    for room, pool in sorted(candidates().items()):
        if rooms and room not in rooms:
            continue
        kinds = sorted(pool)
        random_source.shuffle(kinds)
        for number in range(each):
            choices = pool[kinds[number % len(kinds)]]
            random_source.shuffle(choices)
            while (defect := choices.pop()) and (
                (defect.file, defect.old, defect.new) in before or not _parses(defect)
            ):
                pass
            drawn.append(defect._replace(name=f"{room}-{number}{suffix}"))
    return drawn


# -- Running ---------------------------------------------------------------------------------------------------------


def replaced(text: str, defect: Defect) -> str:
    """Returns the text with the first `old` from the defect's line and column on replaced.

    Raises:
        LookupError: it does not stand there.
    """
    at = _place(text, defect)
    return text[:at] + defect.new + text[at + len(defect.old) :]


def _place(text: str, defect: Defect) -> int:
    lines = text.splitlines(keepends=True)
    at = text.find(defect.old, sum(map(len, lines[: defect.line - 1])) + defect.column)
    if at < 0:
        raise LookupError(f"{defect.file}, from line {defect.line} on, has no {defect.old!r}")
    return at


def load() -> list[Defect]:
    """Returns all defects, by hand and drawn."""
    return [Defect(**row) for file in (BY_HAND, DRAWN) if file.exists() for row in json.loads(file.read_text())]


def check_applies(defect: Defect) -> None:
    """Makes sure that a defect can be planted in the source as it is now.

    Raises:
        LookupError, OSError: its text, or its file, is not there any more.
        SyntaxError: what results is no Python.
    """
    ast.parse(replaced((ROOT / defect.file).read_text(), defect))


def check() -> int:
    """Prints the defects that can no longer be planted, though their code has not gone; fails where there are any."""
    defects, outgrown = [defect for defect in load() if not defect.has_gone], 0
    for defect in defects:
        try:
            check_applies(defect)
        except (LookupError, OSError, SyntaxError) as error:
            outgrown += 1
            print(f"{defect.name:24} {error}")
    print(f"{len(defects) - outgrown} of {len(defects)} defects can be planted")
    return 1 if outgrown else 0


def run_one(defect: Defect, workers: int, limit_seconds: float, tests: Sequence[str]) -> dict[str, Any]:
    """Plants a defect in a copy of the tree, and runs the tests up to the first failure on behaviour.

    Args:
        defect: the defect.
        workers: how many processes run tests.
        limit_seconds: the time limit of the whole.
        tests: globs of the files of tests to run; () runs the tests of the defect's room, then all others.
    """
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        tree = Path(folder) / "tree"
        leave_out = shutil.ignore_patterns(".git", ".venv*", ".environments", "build", ".hypothesis", ".*_cache")
        shutil.copytree(ROOT, tree, ignore=leave_out, symlinks=True)
        planted = tree / defect.file
        planted.write_text(replaced(planted.read_text(), defect))
        outcome = {"name": defect.name, "room": defect.room, "kind": defect.kind, "found": False, "by": ""}
        outcome["commit"] = _commit()
        by_line = tests_that_run(defect)
        of_room = [str(path.relative_to(tree)) for glob in TESTS_OF_ROOM[defect.room] for path in tree.glob(glob)]
        others = ["tests", *(f"--ignore={path}" for path in of_room)]
        turns = [of_room, others]
        if by_line is not None:
            outcome["tests that run it"] = len(by_line)
            first = [test for test in by_line if test.startswith(tuple(of_room[:1]))]
            turns = [first, [test for test in by_line if test not in first]] if by_line else [of_room]
        if tests:
            turns = [[str(path.relative_to(tree)) for glob in tests for path in tree.glob(glob)]]
        try:
            for chosen in turns:
                by = _confirmed_failure(tree, chosen, workers, started + limit_seconds) if chosen else ""
                if by:
                    outcome |= {"found": True, "by": by}
                    break
        except TimeoutError:
            outcome["out of time"] = True
        outcome["seconds"] = round(time.monotonic() - started, 1)
    return outcome


def _commit() -> str:
    answer = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return answer.stdout.strip()


def record_lines(python: str) -> int:
    """Runs `make test` with a Python from 3.12 on, and writes down which test runs which line."""
    shutil.rmtree(LINES_RUN, ignore_errors=True)
    LINES_RUN.mkdir(parents=True)
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{RECORDER}", "LINES_RUN": str(LINES_RUN)}
    command = [python, "-m", "pytest", "-q", "-p", "lines_run", "-n", "2", "--dist", "worksteal", "--timeout=200"]
    code = subprocess.run(command, cwd=ROOT, env=environment).returncode
    seconds = dict(json.loads(line) for line in (LINES_RUN / "seconds").read_text().splitlines())
    seconds = {name: taken for name, taken in seconds.items() if str(ROOT) not in name}  # elsewhere it has another
    names = sorted(seconds, key=seconds.__getitem__)
    number_of = {name: number for number, name in enumerate(names)}
    tests: dict[str, set[int]] = {}
    for path in LINES_RUN.glob("*.lines"):
        for row in path.read_text(errors="replace").splitlines():
            test, _, line = row.rpartition("\t")
            if test in seconds:
                tests.setdefault(line, set()).add(number_of[test])
        path.unlink()
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in (ROOT / SOURCE).rglob("*.py")}
    lines = {line: sorted(numbers) for line, numbers in tests.items()}
    (LINES_RUN / "lines.json").write_text(json.dumps({"texts": texts, "tests": names, "lines": lines}))
    print(f"{len(seconds)} tests run {len(lines)} lines")
    return code


def tests_that_run(defect: Defect) -> list[str] | None:
    """Returns the tests that run the lines of a defect, the quickest first; None where it is not known."""
    if not (LINES_RUN / "lines.json").exists():
        return None
    known = json.loads((LINES_RUN / "lines.json").read_text())
    text = (ROOT / defect.file).read_text()
    if known["texts"].get(defect.file) != text:
        return None
    tree, begins = ast.parse(text), text.count("\n", 0, _place(text, defect)) + 1
    lines: set[int] = set()
    for line in range(begins, begins + defect.old.count("\n") + 1):
        first, last = _statement_around(tree, line)
        lines.update(range(first, last + 1))
    chosen = [known["lines"].get(f"{defect.file}:{line}", []) for line in lines]
    tests = [known["tests"][number] for number in sorted({number for those in chosen for number in those})]
    # Ranks that stay from test to test are seen to run a line in the first of them only.
    files = {test.partition("::")[0] for test in tests}
    stay = {file for file in files if "RankPool" in (ROOT / file).read_text()}
    return list(dict.fromkeys([*tests, *(test for test in known["tests"] if test.partition("::")[0] in stay)]))


def _statement_around(tree: ast.AST, line: int) -> tuple[int, int]:
    """Returns the first and last line of the innermost statement around a line, without the statements inside it."""
    around = (line, line)
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or node.lineno):
            body = getattr(node, "body", None)
            last = body[0].lineno - 1 if body else node.end_lineno
            if line <= (last or line):
                around = node.lineno, max(node.lineno, last or line)  # the walk comes to inner ones later
    return around


def _confirmed_failure(tree: Path, chosen: list[str], workers: int, deadline: float) -> str:
    """Returns the first test whose assertion fails, and fails again; or "".

    Raises:
        TimeoutError: the deadline came before the tests had ended.
    """
    set_aside: list[str] = []  # tests that passed when they were repeated, that hung, or whose process died
    while True:
        leave_out = [f"--deselect={test}" for test in set_aside]
        failed, ended = _first_failures(tree, [*chosen, *leave_out], workers, deadline - time.monotonic())
        for by in failed:
            with suppress(TimeoutError):
                if any(by in _first_failures(tree, [by], 1, 200.0)[0] for _ in range(REPEATS)):
                    return by
        if not failed and not ended:
            return ""
        set_aside += [*failed, *ended]


def _first_failures(tree: Path, chosen: list[str], workers: int, limit_seconds: float) -> tuple[list[str], list[str]]:
    """Runs tests up to the first failure; each worker may come to one. Processes left behind end with their group.

    Returns:
        The tests that failed, and those that their time limit ended or whose process died.

    Raises:
        TimeoutError: the tests did not end within the limit.
        RuntimeError: pytest found none of the chosen tests.
    """
    report, names = tree / "report.txt", tree / "chosen.txt"
    names.write_text("\n".join(chosen))  # thousands may be more than a command line takes
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--timeout=100", "-n", str(workers)),
        *(f"--ignore-glob=*{test}*" for test in TEXT_TESTS),
        f"@{names}",
    ]
    # In fewer columns, pytest would leave out why a test with a long name has failed.
    environment = os.environ | {"PYTHONPATH": str(tree / "src"), "COLUMNS": "1000"}
    with report.open("w") as output:
        process = subprocess.Popen(
            command, cwd=tree, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            process.wait(timeout=max(limit_seconds, 1.0))
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"the tests did not end within {limit_seconds:.0f} s") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    text = report.read_text(errors="replace")
    is_all_set_aside = any(each.startswith("--deselect=") for each in chosen)
    if process.returncode == _USAGE_ERROR or (process.returncode == _NO_TESTS and not is_all_set_aside):
        raise RuntimeError(text[-2000:])
    found = re.findall(r"^(?:FAILED|ERROR) (\S+::.+?)(?: - (.*))?$", text, re.MULTILINE)
    ended = [test for test, why in found if why.startswith("Failed: Timeout") or "crashed while running" in why]
    return [test for test, _ in found if test not in ended], ended


def run(arguments: argparse.Namespace) -> int:
    """Runs the defects of a shard that have no result yet, or were missed without a reason before this commit.

    The one that `--only` names runs again in any case, e.g. because it points at other code now.
    """
    shard, shards = map(int, arguments.shard.split("/"))
    reasons = {defect.name for defect in load() if defect.reason}
    known = {
        row["name"]
        for row in results()
        if "out of time" not in row and (row["found"] or row["name"] in reasons or row["commit"] == _commit())
    }
    RESULTS.parent.mkdir(exist_ok=True)
    chosen = [
        defect
        for number, defect in enumerate(load())
        if number % shards == shard
        and (arguments.only or defect.name not in known)
        and not defect.has_gone
        and arguments.room in (None, defect.room)
        and arguments.only in (None, defect.name)
    ]
    for defect in chosen[: arguments.limit]:
        tests = TESTS_OF_ROOM[defect.room] if arguments.own_tests else arguments.tests
        outcome = run_one(defect, arguments.workers, arguments.limit_seconds, tests)
        with RESULTS.open("a") as file:
            file.write(json.dumps(outcome) + "\n")
        ending = outcome["by"] or ("OUT OF TIME" if "out of time" in outcome else "NOT FOUND")
        print(f"{defect.name:24} {defect.kind:12} {outcome['seconds']:6.0f} s  {ending}", flush=True)
    return table()


def results() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def table() -> int:
    """Prints how many were found, by room, and how many at their first run; fails below 95 %."""
    every = results()
    rows = list({row["name"]: row for row in every}.values())  # the latest of each
    planted, found = Counter(row["room"] for row in rows), Counter(row["room"] for row in rows if row["found"])
    for room in sorted(planted):
        print(f"{room:16} {found[room]:4} of {planted[room]:4}")
    missed = {row["name"]: "out of time" in row for row in rows if not row["found"]}
    reasons = {defect.name: defect.reason for defect in load() if defect.reason}
    for name, is_unfinished in sorted(missed.items()):
        why = reasons.get(name, "no reason is given")
        print(f"  {'out of time' if is_unfinished else 'missed'}: {name}  {why}")
    share = sum(found.values()) / max(1, sum(planted.values()))
    at_first = sum(row["found"] for row in {row["name"]: row for row in reversed(every)}.values())
    print(f"{sum(found.values())} of {sum(planted.values())} found: {share:.1%}; at their first run {at_first}")
    return 0 if share >= 0.95 else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    drawing = commands.add_parser("draw")
    drawing.add_argument("--seed", type=int, required=True)
    drawing.add_argument("--each", type=int, default=3, help="how many for each room")
    drawing.add_argument("--suffix", required=True, help="ends the names, and tells this draw from those before")
    drawing.add_argument("--room", action="append", default=[])
    running = commands.add_parser("run")
    running.add_argument("--shard", default="0/1")
    running.add_argument("--room")
    running.add_argument("--only")
    running.add_argument("--limit", type=int)
    running.add_argument("--own-tests", action="store_true", help="only the tests of the defect's room")
    running.add_argument("--tests", action="append", default=[], metavar="GLOB", help="only the tests in these files")
    running.add_argument("--workers", type=int, default=2)
    running.add_argument("--limit-seconds", type=float, default=900.0)
    recording = commands.add_parser("lines")
    recording.add_argument("--python", required=True)
    commands.add_parser("table")
    commands.add_parser("check")
    arguments = parser.parse_args()
    if arguments.command == "draw":
        drawn = draw(arguments.seed, arguments.each, arguments.suffix, arguments.room)
        earlier = json.loads(DRAWN.read_text())
        DRAWN.write_text(json.dumps([*earlier, *(defect._asdict() for defect in drawn)], indent=1) + "\n")
        print(f"seed {arguments.seed}: {len(drawn)} defects", dict(Counter(defect.kind for defect in drawn)))
        return 0
    if arguments.command == "check":
        return check()
    if arguments.command == "lines":
        return record_lines(arguments.python)
    return run(arguments) if arguments.command == "run" else table()


if __name__ == "__main__":
    sys.exit(main())
