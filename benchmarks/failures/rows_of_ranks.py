"""Failures of a rank, with the expected reports and the times for these."""

from __future__ import annotations

import signal
from functools import partial

from failures.observation import Row
from failures.runs import LAUNCHER, WARNING, call, fill_memory, run, wait_for_warning

RANK_1 = r"^gradsync: rank 1 \(pid \d+ on \S+\)"
KILLED = rf"{RANK_1} was killed by SIGKILL"
BY_SIGKILL = {LAUNCHER: 128 + signal.SIGKILL}
FAILED = {LAUNCHER: 1}
NAMES_RANK_1 = r"\brank 1\b"


def why_no_gpu() -> str | None:
    """Returns why no failure of a GPU can be shown, or None."""
    try:
        import cupy

        return None if cupy.cuda.runtime.getDeviceCount() else "CuPy sees no GPU"
    except Exception as error:  # absent, or without a driver, each in its own way
        return f"no GPU: {error}"


def why_no_two_gpus() -> str | None:
    """Returns why no failure between two GPUs can be shown, or None."""
    missing = why_no_gpu()
    if missing is not None:
        return missing
    import cupy

    count = cupy.cuda.runtime.getDeviceCount()
    return None if count > 1 else f"NCCL needs a GPU for each rank, and there is {count}"


def before_init() -> list[Row]:
    before = partial(Row, phase="before init", ranks=2, told_within=0.2, down_within=1.0)
    return [
        before(
            "exits-before-init",
            "exits with 3",
            play=run(2, "before-init", "exit-3"),
            report=(rf"{RANK_1} failed with exit code 3", "the disk is full"),
            exit_codes={LAUNCHER: 3},
        ),
        before(
            "killed-before-init",
            "SIGKILL",
            play=run(2, "before-init", "kill"),
            report=(KILLED,),
            exit_codes=BY_SIGKILL,
        ),
        before(
            "import-fails",
            "an import fails",
            play=run(2, "before-init", "import"),
            report=(rf"{RANK_1} failed with exit code 1:", "^ModuleNotFoundError: No module named 'a_module"),
            exit_codes=FAILED,
        ),
    ]


def deaths() -> list[Row]:
    """A rank is killed while others need it."""
    death = partial(Row, errors=("RankFailed",), names=NAMES_RANK_1, told_within=0.5)
    killed = partial(death, failure="SIGKILL", report=(KILLED,), exit_codes=BY_SIGKILL)
    rows = [
        killed("killed-in-init", phase="init", ranks=3, play=run(3, "in-init", "kill"), raising=(0,)),
        killed("killed-computing", phase="computing", ranks=2, play=run(2, "computing", "kill"), raising=(0,)),
        killed("killed-in-barrier", phase="barrier", ranks=2, play=run(2, "barrier", "kill"), raising=(0,)),
    ]
    return [
        *rows,
        *(
            killed(
                f"killed-in-all_reduce-{ranks}",
                phase="all_reduce",
                ranks=ranks,
                play=run(ranks, "all_reduce", "kill"),
                raising=tuple(rank for rank in range(ranks) if rank != 1),
            )
            for ranks in (2, 4)
        ),
        killed(
            "killed-in-big-all_reduce",
            phase="all_reduce of 64 MB",
            ranks=2,
            play=run(2, "big-all_reduce", "kill"),
            raising=(0,),
        ),
        killed(
            "killed-over-nccl",
            phase="all_reduce over NCCL",
            ranks=2,
            play=run(2, "all_reduce", "kill", backend="nccl"),
            raising=(0,),
            told_within=1.0,
            needs=why_no_two_gpus,
        ),
        death(
            "exits-with-0",
            "os._exit(0)",
            "computing",
            2,
            run(2, "computing", "exit-0"),
            raising=(0,),
            report=(r"^gradsync: rank 1 \(pid \d+\) ended with exit code 0 before this failure",),
            exit_codes=FAILED,
        ),
    ]


def silences() -> list[Row]:
    """A rank runs, and does not answer or arrive."""
    silence = partial(Row, ranks=2, raising=(0,), names=NAMES_RANK_1, exit_codes=FAILED)
    stopped = partial(
        silence,
        failure="SIGSTOP",
        errors=("RankFailed",),
        told_within=3.0,
        report=(r"RankFailed: .*rank 1/2 \(pid \d+\) was stopped",),
    )
    absent = partial(silence, phase="computing", begins_with_waiting=True)
    return [
        stopped("stopped-in-all_reduce", phase="all_reduce", play=run(2, "all_reduce", "stop")),
        stopped("stopped-computing", phase="computing", play=run(2, "computing", "stop")),
        absent(
            "absent",
            "does not come; limit 1 s",
            play=run(2, "computing", "stall", "--collective-timeout", "1"),
            errors=("CollectiveTimeout",),
            report=("CollectiveTimeout: .* for rank 1$", "load_batch"),
            told_within=1.5,
        ),
        absent(
            "absent-warning",
            "does not come; warning",
            play=run(2, "computing", "stall", "--collective-timeout", "8", strike=wait_for_warning),
            raising=(),
            report=(WARNING.pattern,),
            exit_codes={LAUNCHER: 128 + signal.SIGTERM},
            ends_run=False,
            told_within=5.5,
        ),
    ]


def exceptions() -> list[Row]:
    raised = partial(Row, errors=("RankFailed",), names=NAMES_RANK_1, exit_codes=FAILED, told_within=0.3)
    of_a_script = partial(
        raised,
        failure="exception, script",
        report=(rf"{RANK_1} failed with exit code 1", "^ValueError: no such batch"),
    )
    of_a_function = partial(raised, phase="barrier", ranks=2, raising=(0,))
    worker = r"worker\[1\] failed with exitcode=1"
    return [
        of_a_script("raises", phase="computing", ranks=2, play=run(2, "computing", "raise"), raising=(0,)),
        of_a_script("raises-4", phase="computing", ranks=4, play=run(4, "computing", "raise"), raising=(0, 2, 3)),
        of_a_function(
            "raises-in-function",
            "exception, gs.launch",
            play=call("raise"),
            report=(worker, "^ValueError: no such batch"),
        ),
        of_a_function(
            "raises-unpicklable",
            "exception that does not unpickle",
            play=call("raise-stubborn"),
            report=(worker, "_Stubborn: batch 7: bad"),
        ),
    ]


def memory() -> list[Row]:
    out = partial(Row, phase="computing", ranks=2, raising=(0,), errors=("RankFailed",), names=NAMES_RANK_1)
    return [
        out(
            "memory-error",
            "MemoryError",
            play=run(2, "computing", "memory"),
            report=(rf"{RANK_1} failed with exit code 1:",),
            exit_codes=FAILED,
            told_within=0.3,
        ),
        out(
            "out-of-memory-kill",
            "kernel's out-of-memory killer",
            play=fill_memory(2),
            report=(rf"{KILLED}: the kernel's out-of-memory killer",),
            exit_codes=BY_SIGKILL,
            told_within=0.5,
        ),
        out(
            "gpu-memory",
            "out of GPU memory",
            play=run(2, "computing", "gpu-memory"),
            report=(rf"{RANK_1} failed with exit code 1:",),
            exit_codes=FAILED,
            told_within=0.3,
            needs=why_no_gpu,
        ),
    ]
