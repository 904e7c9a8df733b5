"""Says which threshold suits a model's gradients on this machine.

    gradsync run -n 2 examples/threshold.py shapes.json

Any launcher will do. Two lines of a loop write the file; without a file, the gradients are those of SHAPES.

    shapes = {name: [str(g.dtype), g.shape] for name, g in gradients.items()}
    json.dump(shapes, open("shapes.json", "w"))
"""

import json
import sys
import time
from contextlib import suppress
from pathlib import Path
from statistics import median, quantiles

import numpy as np

import gradsync as gs

with suppress(ImportError):
    import ml_dtypes  # noqa: F401, gives NumPy the name bfloat16

THRESHOLDS = (0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0)  # MB; gradsync's default is 10
SHAPES = {f"{kind}{n}": ["float32", size] for n in range(16) for kind, size in [("w", [512, 512]), ("b", [512])]}


def measure(comm, shapes, rounds=20, warm_up=2):
    """Returns the seconds of each threshold's steps, on the slowest rank."""
    xp, wait = np, lambda: None
    if comm.device != "cpu":
        import cupy as xp

        wait = xp.cuda.get_current_stream().synchronize
    sizes = {mb: f"{mb} MB" for mb in THRESHOLDS}
    syncs = {  # there are no parameters to compare
        mb: gs.AllreduceCallback("mean", comm, name=size, threshold_bytes=size, check_every=0)
        for mb, size in sizes.items()
    }
    seconds = {mb: [] for mb in THRESHOLDS}
    for number in range(warm_up + rounds):
        for mb in THRESHOLDS[:: -1 if number % 2 else 1]:  # in turns, so that a slow moment slows them all
            gradients = {name: xp.ones(size, dtype) for name, (dtype, size) in shapes.items()}  # new ones, as in a loop
            wait()
            comm.barrier()
            began = time.perf_counter()
            with syncs[mb].backward():
                for name, gradient in gradients.items():
                    syncs[mb](name, gradient)
            wait()
            slowest = comm.all_reduce(np.array(time.perf_counter() - began), "max")
            if number >= warm_up:
                seconds[mb].append(float(slowest))
    return seconds


def advice(seconds):
    """Returns a sentence: which threshold to take. `seconds` has the times of each threshold's steps, by its MB."""
    medians = {mb: median(times) for mb, times in seconds.items()}
    fastest, rounds = min(medians, key=medians.get), min(map(len, seconds.values()))
    if rounds < 8:
        return f"{fastest:g} MB was fastest, but this may be chance: measure more than {rounds} rounds, at least 8."
    if 10 not in medians:
        return f"Of these, {fastest:g} MB was fastest. The default of 10 MB was not measured."
    low, _, high = quantiles(seconds[fastest], n=4, method="inclusive")
    noise = max(0.03 * medians[fastest], high - low)
    beaten = {mb: np.mean(np.array(times) > seconds[fastest]) for mb, times in seconds.items()}  # in how many rounds
    alike = [mb for mb in sorted(medians) if medians[mb] <= medians[fastest] + noise or beaten[mb] < 0.75]
    limit = f"differences below {1e3 * noise:.3g} ms are noise"
    if len(alike) == len(medians):
        return f"Keep the default of 10 MB: there is nothing to choose, as all thresholds are alike, and {limit}."
    if 10 in alike:
        return f"The default of 10 MB is right: no other threshold is faster, as {limit}."
    return f'Take threshold_bytes="{alike[0]:g} MB": the default of 10 MB is slower, and {limit}.'


if __name__ == "__main__":
    shapes = json.loads(Path(sys.argv[1]).read_text()) if sys.argv[1:] else SHAPES
    with gs.init_process_group() as comm:
        seconds = measure(comm, shapes)
        if comm.rank == 0:
            for mb, times in seconds.items():
                print(f"{mb:4g} MB  {1e3 * median(times):.3g} ms")
            print(advice(seconds))
