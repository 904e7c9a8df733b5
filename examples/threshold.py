"""Times thresholds on this machine, and says which one suits a model's gradients.

    gradsync run -n 2 examples/threshold.py shapes.json

Any launcher will do. Two lines of a training loop write the file; without a file, the gradients are those of SHAPES.

    shapes = {name: [str(g.dtype), g.shape] for name, g in gradients.items()}  # as the loop hands them over
    json.dump(shapes, open("shapes.json", "w"))
"""

import json
import sys
import time
from pathlib import Path
from statistics import median, quantiles

import numpy as np

import gradsync as gs

THRESHOLDS, DEFAULT = (0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0), 10.0  # MB
ROUNDS, WARM_UP, FEWEST = 20, 2, 8
SHAPES = {f"{kind}{n}": ["float32", size] for n in range(16) for kind, size in [("w", [512, 512]), ("b", [512])]}


def measure(comm, shapes, rounds=ROUNDS):
    """Returns the seconds of each threshold's steps, on the slowest rank."""
    xp, wait = np, lambda: None
    if comm.device != "cpu":
        import cupy as xp

        wait = xp.cuda.get_current_stream().synchronize
    if any(dtype == "bfloat16" for dtype, _ in shapes.values()):
        import ml_dtypes  # noqa: F401, gives NumPy this name
    syncs = {mb: gs.AllreduceCallback("mean", comm, threshold_bytes=f"{mb} MB") for mb in THRESHOLDS}
    seconds = {mb: [] for mb in syncs}
    for number in range(WARM_UP + rounds):
        for mb in list(syncs)[:: -1 if number % 2 else 1]:  # in turns, so that a slow moment slows them all
            gradients = {name: xp.ones(size, dtype) for name, (dtype, size) in shapes.items()}  # new ones, as in a loop
            wait()
            comm.barrier()
            began = time.perf_counter()
            with syncs[mb].backward():
                futures = [syncs[mb](name, gradient) for name, gradient in gradients.items()]
            for future in futures:
                future.result()
            wait()
            slowest = comm.all_reduce(np.array(time.perf_counter() - began), "max")
            if number >= WARM_UP:
                seconds[mb].append(float(slowest))
    return seconds


def advice(seconds):
    """Returns a sentence: which threshold to take. `seconds` has the times of its steps by its size in MB."""
    medians = {mb: median(times) for mb, times in seconds.items()}
    fastest = min(medians, key=medians.get)
    rounds = min(map(len, seconds.values()))
    if rounds < FEWEST:
        return f"{fastest:g} MB was fastest, but {rounds} rounds may be chance: at least {FEWEST} are needed."
    low, _, high = quantiles(seconds[fastest], n=4, method="inclusive")
    noise = max(0.03 * medians[fastest], high - low)
    alike = [mb for mb in sorted(medians) if medians[mb] <= medians[fastest] + noise]
    take = DEFAULT if DEFAULT in alike else alike[0]
    limit = f"differences below {1e3 * noise:.2g} ms are noise"
    if len(alike) == len(medians):
        return (
            f"Keep the default of {DEFAULT:g} MB: there is nothing to choose, as all thresholds are alike and {limit}."
        )
    if take == DEFAULT:
        return f"The default of {take:g} MB is right: no other threshold is faster, as {limit}."
    return f'Take threshold_bytes="{take:g} MB": the default of {DEFAULT:g} MB is slower, and {limit}.'


if __name__ == "__main__":
    shapes = json.loads(Path(sys.argv[1]).read_text()) if sys.argv[1:] else SHAPES
    with gs.init_process_group() as comm:
        seconds = measure(comm, shapes)
        if comm.rank == 0:
            print("threshold  median of a step")
            for mb, times in seconds.items():
                print(f"{mb:6g} MB  {1e3 * median(times):.3g} ms")
            print(advice(seconds))
