"""Measures gradsync on a GPU: copy bandwidth, packing, and a step beside PyTorch's DistributedDataParallel.

    python benchmarks/gpu.py          # writes benchmarks/results/gpu.json
    python benchmarks/gpu.py --quick  # few rounds, writes nothing
    python benchmarks/gpu.py --tiny   # tries the script itself; the figures mean nothing

Runs from source too: PYTHONPATH=src python benchmarks/gpu.py, with the CuPy of that Python. PyTorch takes part if it
is installed. Contenders take turns, round by round; a contender counts with the median of its rounds. The exit
code is 1 when a promise is not kept, 2 when there is no GPU or a part failed; the other parts are measured anyway.

Takes about 10 GB of the GPU's memory, in both processes together.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

import gradsync as gs
from gradsync.communicators.nccl.connect import count_devices
from gradsync.communicators.nccl.library import check_library
from measurement import add_output, provenance, write_result
from on_gpu.rows import Row, table_of
from on_gpu.scale import FULL, QUICK, TINY, Scale
from on_gpu.targets import COPY, PACKING, SHARED, STEP, judge

FOLDER = Path(__file__).parent
TITLES = {
    COPY: "Copies: until the device is done, by its clock",
    PACKING: "Packing: until the device is done, by its clock; until the call returns, by the host's",
    STEP: "Steps of one rank, packing forced: until the device is done, by the host's clock",
    SHARED: "Steps of two ranks on one GPU, by the host's clock: show that they are right, nothing more",
}


def why_no_gpu() -> str | None:
    """Returns why nothing can be measured here, or None when it can."""
    try:
        check_library()
        return None if count_devices() else "CUDA shows no device to this process"
    except gs.BackendUnavailable as error:
        return str(error)


def run(parts: Sequence[str], scale: Scale, console: Console) -> tuple[list[Row], dict[str, Any], dict[str, str]]:
    """Measures parts and prints each once it is done.

    Returns:
        The rows, the versions of what was loaded, and, of each part that failed, the error.
    """
    # They import CuPy, which may not be there before why_no_gpu() has looked.
    from on_gpu import copying, hardware, packing, steps
    from on_gpu.clock import DeviceClock

    rows: list[Row] = []
    failures: dict[str, str] = {}
    versions: dict[str, Any] = hardware.versions()
    clock = DeviceClock(scale.filler_bytes)
    for part in parts:
        try:
            if part == COPY:
                of_part = copying.measure(scale, clock)
            elif part == PACKING:
                of_part = packing.measure(scale, clock)
            elif part == STEP:
                of_part, versions["in_steps"] = steps.measure_alone(scale)
            else:
                of_part = steps.measure_shared(scale)
        except Exception as error:  # of CUDA too: what other parts have found shall not be lost by it
            failures[part] = f"{type(error).__name__}: {error}"
            print(f"gpu: part {part!r} failed: {failures[part]}", file=sys.stderr)
            continue
        console.print(table_of(TITLES[part], of_part))
        rows += of_part
    return rows, versions, failures


def parts_of(only: str | None) -> list[str]:
    """Returns the parts to measure, in order."""
    if only is None:
        return list(TITLES)
    return [COPY, PACKING] if only == PACKING else [only]  # packing is compared with the copies of the same run


def as_dictionary(
    made: dict[str, Any], scale: Scale, rows: Sequence[Row], targets: list[dict[str, Any]], failures: dict[str, str]
) -> dict[str, Any]:
    settings = {**asdict(scale), "models": list(scale.models)}
    results = {"rows": [row.as_json() for row in rows], "targets": targets}
    return {**made, "settings": settings, **results, "failures": failures}


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure gradsync on a GPU.")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", dest="scale", action="store_const", const=QUICK, help="few rounds; writes likewise")
    size.add_argument("--tiny", dest="scale", action="store_const", const=TINY, help="a trial; writes likewise")
    parser.add_argument("--only", choices=tuple(TITLES), help="one part; writes only with --output")
    add_output(parser, "gpu")
    parser.set_defaults(scale=FULL)
    return parser.parse_args()


def main() -> int:
    options = parse_options()
    reason = why_no_gpu()
    if reason is not None:
        print(f"gpu: nothing to measure without a GPU: {reason}", file=sys.stderr)
        return 2
    from on_gpu.hardware import gpu

    made = provenance("benchmarks/gpu.py")
    made["machine"]["gpu"] = gpu()
    console = Console()
    if not console.is_terminal:
        console.width = 120  # a file has no width
    rows, versions, failures = run(parts_of(options.only), options.scale, console)
    made["versions"] |= versions
    targets = judge(rows)
    for target in targets:
        print(f"{target['what']}: {target['measured']:.2f}, limit {target['limit']:g}")
    whole = options.scale is FULL and options.only is None
    write_result("gpu", options.output, as_dictionary(made, options.scale, rows, targets, failures), is_whole=whole)
    if failures:
        return 2
    return 1 if not all(target["kept"] for target in targets) else 0


if __name__ == "__main__":
    sys.exit(main())
