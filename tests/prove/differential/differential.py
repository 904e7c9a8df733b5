"""Runs the same random programs on the first edition and on this tree, and compares: same bits, same errors.

    python tests/prove/differential/differential.py    # makes a worktree of the first edition, and removes it
    python tests/prove/differential/differential.py --old PATH --programs 200 --seed 1
    python tests/prove/differential/differential.py --old PATH --seed 1 --only 17   # prints one program, and its end

A program is drawn as data, from one seed, and run on one local rank and over shared memory on 2 and 3 ranks by
differential_rank.py, once with each tree's `src`. Every result must have the same bits. A program that ends in an
error must end in an error of the same type and with the same fields, wording apart, on the same ranks. CHANGES lists
what may differ. `--old PATH --new PATH` with one path twice shows what chance does: nothing should differ.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1] / "tools")]

from programs import draw_groups, draw_step

T = TypeVar("T")

ROOT = Path(__file__).parents[3]
FIRST_EDITION = "f228c8e"
PLACES = (("local", 1), ("shm", 2), ("shm", 3))
PATIENCE_SECONDS = 1200

#: What may differ from the first edition where a program has it: what some rank may now end with, and why.
CHANGES = {
    "no_sync": (("InvalidArgument",), "issue 17: handing over inside no_sync() kept nothing"),
    "write": (("ValueError",), "issue 17: a gradient in flight cannot be written to"),
    "crosswise": (("PlanMismatch",), "issue 17: callbacks that met crosswise averaged each other's gradients"),
    "less of views": (
        ("PlanMismatch",),
        "design.md, section 6: no merged launches, so PlanMismatch.index counts buckets",
    ),
    "number": (("numbers", "PlanMismatch"), "design.md, section 3: a gradient may be a number"),
}

DTYPES = ("float32", "float64", "float16", "bfloat16", "complex64", "int8", "int32", "int64", "uint16", "bool")
SPECS = {
    "one": ([40], "float32"),
    "two": ([40], "float32"),
    "matrix": ([17, 5], "float32"),
    "double": ([33, 3], "float64"),
    "scalar": ([], "float64"),
    "empty": ([0, 3], "float32"),
    "half": ([50], "float16"),
    "complex": ([6], "complex64"),
    "huge": ([3000], "float32"),
}


# -- Drawing ---------------------------------------------------------------------------------------------------------


class Seeded(random.Random):
    """Choices of a seed; see programs.Choices."""

    def among(self, options: Sequence[T]) -> T:
        return self.choice(list(options))

    def number(self, low: int, high: int) -> int:
        return self.randint(low, high)


def draw(seed: int, number: int, ranks: int) -> dict[str, Any]:
    """Draws a program: two in five have a disagreement or a mistake, planted in one step of one rank."""
    choices = Seeded(f"{seed} {number} {ranks}")
    is_planted = choices.random() < 0.4
    kind = choices.among(("collectives", "gradients"))
    drawn = (draw_gradients if kind == "gradients" else draw_collectives)(choices, ranks, is_planted)
    return {"kind": kind, "number": number, "seed": number, **drawn}


def draw_collectives(choices: Seeded, ranks: int, is_planted: bool) -> dict[str, Any]:
    groups = draw_groups(choices, ranks)
    steps = [
        draw_step(choices, groups, dtypes=DTYPES, most_rows=choices.among((5, 60, 20_000)))._asdict()
        for _ in range(choices.number(1, 8))
    ]
    planted = None
    if is_planted:  # in a step that all ranks take, and wait for
        at, what = choices.number(0, len(steps)), choices.among(("raise", "leave", "skip", *INSTEAD))
        step = draw_step(choices, groups[:1], dtypes=("float32",), most_rows=5, kinds=("all_reduce",))
        steps.insert(at, {**step._asdict(), "is_asynchronous": False, "tail": [2], "rows": [5] * ranks})
        planted = {"what": what, "step": at, "rank": choices.number(0, ranks - 1), "instead": INSTEAD.get(what, {})}
    constructs = [f"planted: {planted['what']}"] if planted else []
    return {"groups": groups, "steps": steps, "planted": planted, "constructs": constructs}


#: What one rank does in place of an all_reduce of float32[5, 2].
INSTEAD: dict[str, dict[str, Any]] = {
    "other dtype": {"dtype": "float64"},
    "other shape": {"tail": [3]},
    "other kind": {"kind": "broadcast"},
    "barrier": {"kind": "barrier"},
    "bad op": {"op": "avg"},
    "bad root": {"kind": "broadcast", "root": 99},
    "bad dtype": {"dtype": "bool", "op": "mean"},
}


def draw_gradients(choices: Seeded, ranks: int, is_planted: bool) -> dict[str, Any]:
    mode = choices.among(("plain", "plain", "parameters", "zero", "views"))
    names = sorted(SPECS)
    options: dict[str, Any] = {
        "reduce_method": choices.among(("mean", "sum")),
        "threshold_bytes": choices.among((1, 700, 10**7)),
        "parameters": mode in ("parameters", "zero", "views"),
        "missing": "zero" if mode == "zero" else "error",
        "gradient_as_bucket_view": mode == "views",
        "nonfinite": choices.among(("off", "off", "raise", "skip")),
    }
    if mode in ("plain", "parameters"):
        options |= choices.among(
            ({}, {"compression": "float16"}, {"prescale": 0.5}, {"postscale": 3.0}, {"clip_norm": 1.0})
        )
    callbacks = 2 if mode == "plain" and choices.random() < 0.3 else 1
    steps: list[dict[str, Any]] = []
    for _ in range(choices.number(1, 6)):
        if steps and choices.random() < 0.5:  # loops repeat themselves
            steps.append(steps[-1])
            continue
        mine = [choices.sample(names, len(names)) for _ in range(ranks)]
        if mode == "zero":
            mine = [each[: choices.number(1, len(names))] for each in mine]
        elif mode == "plain":
            mine = [mine[0][: choices.number(1, len(names))]] * ranks
        steps.append({"names": mine, "is_own": choices.random() < 0.7 or mode == "views", "has_local_pass": False})
    planted, constructs = None, []
    if is_planted:
        kinds = [
            "order",
            "less",
            "shape",
            "dtype",
            "twice",
            "nan",
            "raise",
            "leave",
            "method",
            "write",
            "number",
            "no_sync",
        ]
        what = choices.among([*kinds, *["crosswise"] * (12 * callbacks - 12)])
        planted = {"what": what, "step": choices.number(0, len(steps) - 1), "rank": choices.number(0, ranks - 1)}
        construct = "less of views" if (what, mode) == ("less", "views") else what
        constructs += [construct if construct in CHANGES else f"planted: {what}"]
        if what == "no_sync":
            steps[planted["step"]] = {**steps[planted["step"]], "has_local_pass": True}
    return {
        "mode": mode, "options": options, "callbacks": callbacks, "steps": steps, "specs": SPECS, "planted": planted,
        "constructs": constructs,
    }  # fmt: skip


# -- Running ---------------------------------------------------------------------------------------------------------


def start(tree: Path, programs: Path, folder: Path, backend: str, ranks: int) -> subprocess.Popen[bytes]:
    folder.mkdir()
    environ = {k: v for k, v in os.environ.items() if not k.startswith("GRADSYNC_")}
    command = [sys.executable, "-m", "gradsync", "run", "-n", str(ranks), "--backend", backend]
    script = [str(Path(__file__).with_name("differential_rank.py")), str(programs), str(folder)]
    with folder.with_suffix(".stderr").open("wb") as stderr:
        return subprocess.Popen([*command, *script], env={**environ, "PYTHONPATH": str(tree / "src")}, stderr=stderr)


def outcomes(trees: Sequence[Path], programs: list[Any], backend: str, ranks: int) -> list[list[list[Any]]]:
    """Runs the programs on each tree; returns what came of them, by tree and program, for each rank."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "programs.json")
        path.write_text(json.dumps(programs))
        folders = [Path(scratch, str(number)) for number in range(len(trees))]
        jobs = [start(tree, path, folder, backend, ranks) for tree, folder in zip(trees, folders, strict=True)]
        try:
            for tree, folder, job in zip(trees, folders, jobs, strict=True):
                if job.wait(PATIENCE_SECONDS):
                    told = folder.with_suffix(".stderr").read_text()
                    sys.exit(f"{told}\n{tree}: the ranks ended with exit code {job.returncode}")
        finally:
            for job in jobs:
                job.kill()
                job.wait()
        return [by_program(folder, ranks) for folder in folders]


def by_program(folder: Path, ranks: int) -> list[list[Any]]:
    """Reads what the ranks have written."""
    files = [(folder / str(rank)).read_text().splitlines() for rank in range(ranks)]
    return [[json.loads(line) for line in lines] for lines in zip(*files, strict=True)]


@contextmanager
def first_edition() -> Iterator[Path]:
    """Gives a worktree of the first edition, for the time of a `with` block."""
    with tempfile.TemporaryDirectory() as folder:
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", f"{folder}/tree", FIRST_EDITION], check=True)
        try:
            yield Path(folder, "tree")
        finally:
            subprocess.run([*git, "remove", "--force", f"{folder}/tree"], check=True)


# -- Comparing -------------------------------------------------------------------------------------------------------


def compare(old: Path, new: Path, programs: int, seed: int, only: int | None) -> int:
    """Prints what differs and how often each construct was drawn; returns how many differ that may not."""
    seen: Counter[str] = Counter()
    differ = 0
    for backend, ranks in PLACES:
        numbers = range(programs) if only is None else [only]
        drawn = [draw(seed, number, ranks) for number in numbers]
        by_tree = outcomes([old, new], drawn, backend, ranks)
        for program, before, after in zip(drawn, *by_tree, strict=True):
            is_right = {end_of(outcome) for outcome in before} == {"numbers"}
            seen["ends in numbers" if is_right else "ends in an error"] += 1
            seen.update([program["kind"], *(program["constructs"] or ["nothing planted"])])
            if not is_right and not program["planted"]:
                seen["ends in an error, and nothing is planted"] += 1
            if only is not None:
                print(json.dumps(program), before, after, sep="\n")
            before, after = zip(*map(comparable, before, after), strict=True)
            if "clip_norm" in program.get("options", ()):
                before, after = ([without_digits(of_rank) for of_rank in side] for side in (before, after))
            changes = [CHANGES[each] for each in program["constructs"] if each in CHANGES]
            reasons = [reason for ends, reason in changes if any(end in ends for end in map(end_of, after))]
            if before != after and reasons:
                seen[f"differ as listed: {reasons[0]}"] += 1
            elif before != after:
                differ += 1
                print(f"program {program['number']} on {ranks} ranks, {backend}: {first_difference(before, after)}")
    total = seen["ends in an error"] + seen["ends in numbers"]
    for name, count in sorted(seen.items()):
        print(f"{count:6} {100 * count / total:5.1f} %  {name}")
    print(f"{total} runs of seed {seed}: {differ} differ")
    return differ


def end_of(outcome: list[Any]) -> str:
    """Returns the type of the error that a rank ended with, or "numbers"."""
    return outcome[-1]["error"] if outcome and isinstance(outcome[-1], dict) else "numbers"


def comparable(old: list[Any], new: list[Any]) -> tuple[list[Any], list[Any]]:
    """Leaves out what chance decides, and what is only new, where a rank ends in an error on both trees.

    How many results a rank has when another one's end reaches it is chance. An error may have more fields than before.
    """
    if "numbers" in (end_of(old), end_of(new)):
        return old, new
    results = min(len(old), len(new)) - 1
    end = {name: value for name, value in new[-1].items() if name in old[-1]}
    return [*old[:results], old[-1]], [*new[:results], end]


def without_digits(outcome: list[Any]) -> list[Any]:
    """Leaves out the values of clipped gradients: squares of small ones are added up in another order than before."""
    return [each.partition(" ")[0] if isinstance(each, str) else each for each in outcome]


def first_difference(before: Sequence[list[Any]], after: Sequence[list[Any]]) -> str:
    for rank, (old, new) in enumerate(zip(before, after, strict=True)):
        for number in range(max(len(old), len(new))):
            pair = old[number : number + 1], new[number : number + 1]
            if pair[0] != pair[1]:
                return f"rank {rank}, result {number}: {pair[0] or 'none'} before, {pair[1] or 'none'} now"
    return "nothing"


def main() -> int:
    parser = argparse.ArgumentParser(description="Compares this tree with the first edition, by random programs.")
    parser.add_argument("--old", type=Path, help="the first edition; without it a worktree is made")
    parser.add_argument("--new", type=Path, default=ROOT)
    parser.add_argument("--programs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="one program of the seed")
    options = parser.parse_args()
    rest = (options.new, options.programs, options.seed, options.only)
    if options.old is not None:
        return min(compare(options.old, *rest), 1)
    with first_edition() as old:
        return min(compare(old, *rest), 1)


if __name__ == "__main__":
    sys.exit(main())
