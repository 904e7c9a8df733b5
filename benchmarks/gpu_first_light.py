"""The first minutes on a GPU: does the NCCL backend work there? Run it before anything else, and before any benchmark.

    PYTHONPATH=src python benchmarks/gpu_first_light.py OUT   # in 7 minutes at most; writes OUT/first_light.json

Each stage is a process of its own, which is killed with all that it has started when its time is over; a stage that
fails keeps no other from running.

    facts    30 s   the versions that are really loaded, the GPU, its driver and compute mode
    raw      60 s   CuPy's binding of NCCL alone, without gradsync: init, reduce, abort, init again, destroy
    kernels  90 s   one rank: values that kernels make; each is compiled here, so later runs find it
    one      90 s   one rank: a callback that checks and clips, step by step
    two     120 s   two ranks on this GPU: collectives, packed buckets, and a kernel that misses a rank

The exit code is the number of stages that failed, or 100 where there is no GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SECONDS = {"facts": 30, "raw": 60, "kernels": 90, "one": 90, "two": 120}
NO_GPU = 100
Found = dict[str, Any]


def facts() -> Found:
    import cupy
    import numpy as np
    from cupy.cuda import nccl, nvrtc

    properties = cupy.cuda.runtime.getDeviceProperties(0)
    query = ["nvidia-smi", "--query-gpu=driver_version,compute_mode,mig.mode.current", "--format=csv,noheader"]
    try:
        smi = subprocess.run(query, capture_output=True, text=True).stdout.strip()
    except OSError as error:
        smi = str(error)
    maps = Path("/proc/self/maps").read_text().splitlines()
    loaded = sorted({line.split(maxsplit=5)[-1] for line in maps if "libnccl.so" in line})
    memory = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    return {
        "gpu": properties["name"].decode(),
        "compute capability": cupy.cuda.Device(0).compute_capability,
        "driver, compute mode, MIG": smi,
        "python": sys.version.split()[0],
        "cupy": cupy.__version__,
        "numpy": np.__version__,
        "cuda runtime": cupy.cuda.runtime.runtimeGetVersion(),
        "nvrtc": nvrtc.getVersion(),
        "nccl": nccl.get_version(),
        "nccl when CuPy was built": nccl.get_build_version(),
        "nccl loaded from": loaded,
        "nccl can revoke": [hasattr(ctypes.CDLL(path), "ncclCommRevoke") for path in loaded],
        "free bytes of /dev/shm": memory and memory.f_bavail * memory.f_bsize,
    }


def raw() -> Found:
    import cupy
    import numpy as np
    from cupy.cuda import nccl

    found: Found = {}
    for end in ("abort", "destroy"):
        began = time.perf_counter()
        comm = nccl.NcclCommunicator(1, bytes(nccl.get_unique_id()), 0)
        found[f"seconds of init before {end}"] = seconds_since(began)
        source = np.arange(1000, dtype=np.float32)
        with cupy.cuda.Stream(non_blocking=True) as stream:
            for op in (nccl.NCCL_SUM, nccl.NCCL_AVG):  # NCCL runs a kernel for the second only: there is one rank
                array, result = cupy.asarray(source), cupy.empty(1000, np.float32)
                comm.allReduce(array.data.ptr, result.data.ptr, 1000, nccl.NCCL_FLOAT32, op, stream.ptr)
                assert (result.get(stream=stream) == source).all(), op
        comm.check_async_error()
        began = time.perf_counter()
        getattr(comm, end)()
        found[f"seconds of {end}"] = seconds_since(began)
    return found


def kernels() -> Found:
    import cupy
    import ml_dtypes
    import numpy as np

    import gradsync as gs

    found: Found = {"wrong": []}

    def check(what: str, holds: bool) -> None:
        if not holds:
            found["wrong"].append(what)

    with gs.init_process_group("nccl", rank=0, world_size=1) as comm:
        for dtype in (np.float16, ml_dtypes.bfloat16, np.float32, np.complex64):
            values = np.arange(12).astype(dtype).reshape(3, 4)
            for op in ("sum", "mean"):
                array = cupy.asarray(values).T  # not contiguous
                comm.all_reduce(array, op)
                check(f"{np.dtype(dtype)} {op}", bool((array.get() == values.T).all()))
        random = np.random.default_rng(1)
        for dtype in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64):
            values = random.standard_normal(100_003).astype(dtype)
            callback = gs.AllreduceCallback("mean", comm, clip_norm=1e9)
            with callback.backward():
                callback("w", cupy.asarray(values))
            wanted = float(np.sqrt((values.astype(np.float64) ** 2).sum()))
            check(f"norm of {np.dtype(dtype)}", callback.norm is not None and abs(callback.norm / wanted - 1) < 1e-6)
            for bad in (np.nan, -np.inf):
                values[77_777] = bad
                callback = gs.AllreduceCallback("mean", comm, nonfinite="skip")
                with callback.backward():
                    callback("w", cupy.asarray(values))
                check(f"{bad} of {np.dtype(dtype)} is found", callback.skip_step)
            callback = gs.AllreduceCallback("mean", comm)
            with callback.backward(weight=3.0):
                future = callback("w", cupy.asarray(values))
            check(f"{np.dtype(dtype)} with a weight", bool((future.numpy() == values).all()))
    return found


def one() -> Found:
    import cupy
    import numpy as np

    import gradsync as gs

    found: Found = {}
    with gs.init_process_group("nccl", rank=0, world_size=1) as comm:
        host = np.arange(9.0)
        assert (comm.all_reduce(cupy.asarray(host)).get() == host).all()
        assert (comm.all_reduce(host.copy(), "mean") == host).all()
        callback = gs.AllreduceCallback("mean", comm, nonfinite="raise", clip_norm=float("inf"))
        for _ in range(20):
            gradients = [cupy.asarray(np.full(1000 + i, i + 1.0, np.float32)) for i in range(30)]
            began = time.perf_counter()
            with callback.backward():
                futures = [callback(i, gradient) for i, gradient in enumerate(gradients)]
            results = [future.numpy() for future in futures]
            found["milliseconds of the last step"] = round(1e3 * (time.perf_counter() - began), 2)
            assert all((result == i + 1).all() for i, result in enumerate(results))
    return found


def two() -> Found:
    """Starts two ranks, and reads what they print: it may be little."""
    variables = {"GRADSYNC_ALLOW_SHARED_GPU": "1", "GRADSYNC_COLLECTIVE_TIMEOUT_SECONDS": "30"}
    environment = {"NCCL_DEBUG": "WARN", **os.environ, **variables}
    run = [sys.executable, "-m", "gradsync", "run", "--no-prefix", "-n", "2", "--backend", "nccl"]
    done = subprocess.run(
        [*run, __file__, "--stage", "rank_of_two"], env=environment, stdout=subprocess.PIPE, text=True
    )
    print(done.stdout)
    found: Found = {}
    for line in done.stdout.splitlines():
        if line.startswith("FOUND "):
            found |= json.loads(line.removeprefix("FOUND "))
    assert "seconds until the missing rank was reported" in found, found
    return found


def rank_of_two() -> Found:
    import cupy
    import numpy as np

    import gradsync as gs

    def show(**found: Any) -> None:
        if comm.rank == 0:
            print("FOUND", json.dumps({name.replace("_", " "): value for name, value in found.items()}), flush=True)

    with gs.init_process_group("nccl") as comm:
        n, rank = comm.world_size, comm.rank
        show(environment={name: value for name, value in os.environ.items() if name.startswith("NCCL_")})
        began = time.perf_counter()
        comm.barrier()
        show(seconds_of_the_first_collective=seconds_since(began))
        for dtype, size in (("float32", 10), ("float16", 1000), ("float32", 2_621_440), ("int64", 333)):
            array = cupy.asarray(np.full(size, rank + 1, dtype))
            assert (comm.all_reduce(array).get() == n * (n + 1) // 2).all(), (dtype, size)
        began = time.perf_counter()
        for _ in range(20):
            comm.barrier()
        show(milliseconds_of_a_barrier=round(1e3 * (time.perf_counter() - began) / 20, 2))
        sizes = [r + 1 for r in range(n)]
        gathered = comm.all_gather(cupy.asarray(np.full((rank + 1, 2), rank, np.int32)), sizes=sizes).get()
        assert (gathered[:, 0] == np.repeat(np.arange(n), sizes)).all()
        target = cupy.empty(5, np.float32)
        source = cupy.asarray(np.full(5, rank, np.float32))
        comm.exchange(source, dest=(rank + 1) % n, out=target, source=(rank - 1) % n)
        assert (target.get() == (rank - 1) % n).all()
        # Gradients at odd addresses and of odd sizes: packing moves all their bytes, and no other.
        host = np.random.default_rng(2).integers(-60, 60, 600_000).astype(np.int8)
        parts = [
            slice(a, a + b) for a, b in ((0, 1), (3, 17), (64, 32768), (40001, 70003), (200002, 5), (300004, 99996))
        ]
        memory, wanted = cupy.asarray(host), host.copy()
        for part in parts:
            wanted[part] *= n
        packing = gs.AllreduceCallback("sum", comm, name="packing")
        with packing.backward():
            for i, part in enumerate(parts):
                packing(i, memory[part])
        assert (memory.get() == wanted).all()
        callback = gs.AllreduceCallback("mean", comm, name="training", threshold_bytes=2**20)
        for _ in range(5):
            gradients = [cupy.asarray(np.full(50_000 + i, rank + i, np.float32)) for i in range(12)]
            began = time.perf_counter()
            with callback.backward():
                futures = [callback(i, gradient) for i, gradient in enumerate(gradients)]
            results = [future.numpy() for future in futures]
            seconds = seconds_since(began)
            assert all((result == i + (n - 1) / 2).all() for i, result in enumerate(results))
        show(seconds_of_the_last_step=seconds)
        # Rank 0 asks nobody before it launches, so its kernel waits on the GPU for a rank that stays away. When that
        # rank aborts, rank 0 must get an error.
        ones = np.ones(5, np.float32)
        comm.all_reduce(ones)
        if rank == 0:
            began = time.perf_counter()
            try:
                comm.all_reduce(ones)
            except gs.GradsyncError as error:
                show(seconds_until_the_missing_rank_was_reported=seconds_since(began), by=type(error).__name__)
        else:
            time.sleep(1.0)
            comm.abort("on purpose")
    return {}


def seconds_since(began: float) -> float:
    return round(time.perf_counter() - began, 3)


STAGES: dict[str, Callable[[], Found]] = {
    **{"facts": facts, "raw": raw, "kernels": kernels, "one": one, "two": two},
    "rank_of_two": rank_of_two,
}


def run_stage(name: str, folder: Path) -> Found:
    """Runs a stage in a session of its own, so that nothing that it starts can keep this process waiting."""
    log, answer = folder / f"first_light_{name}.log", folder / f"first_light_{name}.json"
    answer.unlink(missing_ok=True)
    began = time.perf_counter()
    with log.open("w") as output:
        command = [sys.executable, __file__, "--stage", name, str(answer)]
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(SECONDS[name])
            error = f"exit code {code}" if code else ""
        except subprocess.TimeoutExpired:
            error = f"no end within {SECONDS[name]} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    found = json.loads(answer.read_text()) if answer.exists() else {}
    wrong = found.get("wrong", [])
    result = {"ok": not error and not wrong, "seconds": seconds_since(began), "found": found, "error": error}
    if not result["ok"]:
        result["end of its output"] = log.read_text(errors="replace")[-3000:]
    answer.unlink(missing_ok=True)
    return result


def why_no_gpu() -> str | None:
    """Asks in another process: a driver that hangs must not keep this one."""
    question = "import cupy; print('devices', cupy.cuda.runtime.getDeviceCount())"
    try:
        asked = subprocess.run(
            [sys.executable, "-c", question], capture_output=True, text=True, timeout=SECONDS["facts"]
        )
    except subprocess.TimeoutExpired:
        return None  # there is something: the stages say what
    if "devices 0" in asked.stdout:
        return "CuPy sees no GPU"
    return None if "devices" in asked.stdout else (asked.stderr.strip().splitlines() or ["CuPy failed"])[-1]


def main() -> int:
    if sys.argv[1:2] == ["--stage"]:
        found = STAGES[sys.argv[2]]()
        if len(sys.argv) > 3:
            Path(sys.argv[3]).write_text(json.dumps(found))
        return 0
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    results: Found = {"no gpu": why_no_gpu(), "stages": {}}
    if results["no gpu"]:
        print(f"no GPU: {results['no gpu']}")
    for name in () if results["no gpu"] else SECONDS:
        results["stages"][name] = result = run_stage(name, folder)
        print(name, "ok" if result["ok"] else "FAILED", json.dumps(result, indent=1), flush=True)
        (folder / "first_light.json").write_text(json.dumps(results, indent=1) + "\n")  # if this process is killed, too
    (folder / "first_light.json").write_text(json.dumps(results, indent=1) + "\n")
    return NO_GPU if results["no gpu"] else sum(not result["ok"] for result in results["stages"].values())


if __name__ == "__main__":
    sys.exit(main())
