"""`gradsync doctor`: which backends work on this machine, and how to repair the others.

A broken library may crash or hang the process that loads it, so another process examines it, and ranks of their own try
each backend: they all-reduce 16 MB, and compare the result with NumPy's.

    python -m gradsync.doctor ask mpi                            # or kernels, cupy; the last line is JSON
    gradsync run -n 2 --backend shm -m gradsync.doctor try shm   # mpiexec starts the ranks of mpi

The checks look only at Facts, so that a test can make any machine up.
"""

from __future__ import annotations

import contextlib
import enum
import importlib.metadata
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

import gradsync as gs
from gradsync import environment, launchers
from gradsync.backends import TABLE
from gradsync.errors import BackendUnavailable, GradsyncError, InvalidArgument, size_text
from gradsync.machine import BLAS_VARIABLES, count_gpus, usable_cores, visible_gpus

_Result = TypeVar("_Result")


class Status(enum.StrEnum):
    """How serious a finding is: BROKEN keeps gradsync or a tried backend from working, UNUSABLE lacks something."""

    OK = "ok"
    WARNING = "warning"
    UNUSABLE = "not usable here"
    BROKEN = "broken"


OK, WARNING, UNUSABLE, BROKEN = Status


@dataclass(frozen=True)
class Finding:
    """One line of the report: what a check found, and what to type or do; `what` is the check's name by default."""

    status: Status
    text: str
    advice: str = ""
    what: str = ""


@dataclass(frozen=True)
class Facts:
    """What is known about a machine.

    Attributes:
        environ: the environment variables.
        root: the folder with /proc, /sys and /dev; another than "/" only in tests.
        system, machine: such as "linux" and "x86_64".
        cores: the number of cores that this process may use.
        packages: the installed packages that contain the module cupy.
        answers: what `ask` answered about kernels, mpi and cupy, and the text of mpiexec; {"error": why} without one.
        shared_memory_bytes: the size and the free space of /dev/shm; None if it cannot be examined.
        mpiexec: the path of mpiexec; None if it is not on the PATH.
    """

    environ: Mapping[str, str] = field(default_factory=dict)
    root: Path = Path("/")
    system: str = "linux"
    machine: str = "x86_64"
    cores: int = 8
    packages: Sequence[str] = ()
    answers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    shared_memory_bytes: tuple[int, int] | None = None
    mpiexec: str | None = None

    def read(self, path: str) -> str:
        """Returns the text of a file below `root`; "" if it cannot be read."""
        try:
            return (self.root / path.lstrip("/")).read_text(errors="replace").strip()
        except OSError:
            return ""

    def answer(self, name: str) -> Mapping[str, Any]:
        """Returns an answer of `answers`."""
        return self.answers.get(name, {"error": "no answer"})

    @property
    def has_gpu(self) -> bool:
        """Whether a device file of NVIDIA's driver exists, for Linux or for WSL2 on Windows."""
        devices = self.root / "dev"
        return any(devices.glob("nvidia[0-9]*")) or (devices / "dxg").exists()


# -- The checks --------------------------------------------------------------------------------------------------------


def _python(here: Facts) -> Finding:
    text = f"{platform.python_version()} on {here.system} {here.machine}, {sys.executable}"
    if here.system == "linux":
        return Finding(OK, text)
    return Finding(BROKEN, text, "ranks run on Linux only: use a Linux machine, a container, or WSL2 on Windows")


def _kernels(here: Facts) -> Finding:
    """Checks which kernels the backend shm runs, and whether this processor can run them."""
    answer = here.answer("kernels")
    if "error" in answer:
        return Finding(BROKEN, answer["error"], "install gradsync again: pip install . (-e . in a clone)")
    from gradsync.communicators.shared_memory.compiled import Kernels  # imported here: it fails where the answer is one
    from gradsync.communicators.shared_memory.segment import check_platform

    running = Kernels(**answer)
    try:
        check_platform(running, here.machine)
    except BackendUnavailable as error:
        return Finding(UNUSABLE, str(error), "otherwise use --backend mpi, or nccl with GPUs")
    if running.kind == "C":
        return Finding(OK, f"in C: {running.file}")
    text = f"shared memory runs in plain NumPy, slower than in C: {running.why_plain}"
    return Finding(WARNING, text, running.remedy)


def _shared_memory_folder(here: Facts) -> Finding:
    if here.shared_memory_bytes is None:
        text = "does not exist: MPI and NCCL need it, the backend shm does not"
        return Finding(UNUSABLE, text, "mount -t tmpfs tmpfs /dev/shm")
    size, free = here.shared_memory_bytes
    text = f"{size_text(size)}, {size_text(free)} free"
    if size < 256 * 1024**2:  # Docker's default is 64 MB
        text += ": too small for NCCL, and for MPI with large arrays; the backend shm does not need it"
        advice = "start the container with --shm-size=1g (or --ipc=host); as root: mount -o remount,size=1g /dev/shm"
        return Finding(WARNING, text, advice)
    if free < 64 * 1024**2:
        return Finding(WARNING, f"{text}: NCCL and MPI may run out of space", "see what fills it: ls -l /dev/shm")
    return Finding(OK, text)


def _cores(here: Facts) -> Finding:
    """Checks that there are cores for several ranks, and that libraries start no more threads than there are cores."""
    own = "".join(re.findall(r"(?m)^0::(.*?)/?$", here.read("/proc/self/cgroup")))
    # In a container the root of the control groups has its limits.
    limit = here.read(f"/sys/fs/cgroup{own}/cpu.max") or here.read("/sys/fs/cgroup/cpu.max")
    quota, period = map(int, limit.split()) if re.fullmatch(r"\d+ [1-9]\d*", limit) else (here.cores, 1)
    cores = min(here.cores, quota / period)
    text = f"{cores:g} core{'s' * (cores != 1)}"
    settings = {name: here.environ[name] for name in BLAS_VARIABLES if here.environ.get(name)}
    shown = ", ".join(f"{name}={value}" for name, value in settings.items())
    too_many = [name for name, value in settings.items() if value.isdecimal() and int(value) > cores]
    if too_many:
        advice = f"unset {' '.join(too_many)}: gradsync run then divides the cores among its ranks"
        return Finding(WARNING, f"{text}, but {shown}: each rank starts more threads than there are cores", advice)
    if cores < here.cores - 0.5:
        text = f"limited to {text}, though {here.cores} are visible: more ranks than these are paused by the kernel"
        return Finding(WARNING, text, f"start at most {max(int(cores), 1)} ranks, or: docker run --cpus=N")
    if cores <= 1:
        return Finding(WARNING, f"{text}: ranks that share it wait for each other", "use -n 1, or a larger machine")
    return Finding(OK, f"{text}; {shown or 'gradsync run divides them among its ranks (OMP_NUM_THREADS)'}")


_INSTALL_MPI = (
    "on a machine without an MPI: pip install mpi4py mpich; on a cluster: load its MPI, then pip install mpi4py"
)
_VENDORS = {"Intel": "intel", "Open MPI": r"open.?mpi|openrte|prte", "MPICH": "hydra|mpich"}


def _mpi(here: Facts) -> Finding:
    """Checks that mpi4py can be imported, and that an mpiexec of the same MPI exists."""
    answer = here.answer("mpi")
    if answer.get("error", "").startswith("No module named 'mpi4py'"):
        return Finding(UNUSABLE, "mpi4py is not installed: only the backend mpi needs it", _INSTALL_MPI)
    if "error" in answer:
        return Finding(UNUSABLE, f"mpi4py does not load: {answer['error'].splitlines()[0][:200]}", _INSTALL_MPI)
    loaded = f"mpi4py {answer['version']} over {answer['library']}"
    if here.mpiexec is None:
        advice = "put that MPI's bin folder on the PATH (module load ...), or: pip install mpich"
        return Finding(UNUSABLE, f"{loaded}, but mpiexec, which starts the ranks, is not on the PATH", advice)
    theirs, ours = _vendor(here.answer("mpiexec").get("text", "")), _vendor(answer["library"])
    if theirs and ours and theirs != ours and {theirs, ours} != {"MPICH", "Intel"}:
        text = f"{loaded}, but {here.mpiexec} belongs to {theirs}: each rank would be alone in its own MPI_COMM_WORLD"
        return Finding(WARNING, text, f"use the mpiexec of {ours}: put its bin folder first on the PATH")
    return Finding(OK, f"{loaded}; {here.mpiexec}")


def _vendor(text: str) -> str:
    return next((name for name, marks in _VENDORS.items() if re.search(marks, text, re.IGNORECASE)), "")


def _gpus(here: Facts) -> Finding:
    """Checks which GPUs this process may use, and whether they can access each other's memory."""
    if not here.has_gpu:
        return Finding(UNUSABLE, "no NVIDIA GPU found: only the backend nccl needs one")
    visible = visible_gpus(here.environ)
    setting = f"CUDA_VISIBLE_DEVICES={here.environ.get('CUDA_VISIBLE_DEVICES')}"
    if visible == ():
        return Finding(UNUSABLE, f"{setting} hides all GPUs", "unset CUDA_VISIBLE_DEVICES")
    answer = here.answer("cupy")
    driver = re.search(r"(?:Kernel Module|NVRM version)\D*(\d+\.[\d.]+)", here.read("/proc/driver/nvidia/version"))
    supports = f", which supports CUDA up to {_cuda(answer['driver'])}" if answer.get("driver") else ""
    end = f"; driver {driver[1] if driver else 'of unknown version'}{supports}"
    devices: list[dict[str, Any]] = answer.get("devices", [])
    if not devices:
        return Finding(OK, f"{count_gpus(here.environ, str(here.root / 'dev'))} by their device files{end}")
    names = sorted({device["name"] for device in devices})
    text = f"{len(devices)} x {', '.join(names)}, {devices[0]['memory_bytes'] / 1024**3:.0f} GB{end}"
    if visible is not None and len(devices) < len(visible):
        text += f"; {setting} names {len(visible)} GPUs"
        return Finding(WARNING, text, "list only GPUs of this machine: nvidia-smi -L shows them")
    if any(device["peers"] < len(devices) - 1 for device in devices):
        text += "; not all GPUs can access each other's memory, so NCCL copies through host memory"
        advice = "on a virtual machine: give the machine all GPUs of one switch; check with: nvidia-smi topo -p2p r"
        return Finding(WARNING, text, advice)
    return Finding(OK, text)


def _cuda(number: int) -> str:
    """Returns a version number of CUDA as text: 12090 becomes "12.9"."""
    return f"{number // 1000}.{number % 1000 // 10}"


#: The packages that contain the module `cupy`. If two of them are installed, they overwrite each other's files.
_CUPY_PACKAGES = ("cupy", *(f"cupy-cuda{version}" for version in ("110", "111", "112", "11x", "12x", "13x")))
_OLDEST_CUPY = 14


def _cupy(here: Facts) -> Finding:
    """Checks that one package of CuPy is installed, that it loads, is new enough, and fits the driver."""
    answer = here.answer("cupy")
    driver = answer.get("driver", 0)
    install = f"pip install 'gradsync[cuda{13 if driver >= 13000 else 12}]'"
    install += "" if driver else " (cuda13 where nvidia-smi shows CUDA 13)"
    if len(here.packages) > 1:
        names = " ".join(here.packages)
        text = f"{len(here.packages)} packages install CuPy into one folder, and Python loads a mixture: {names}"
        return Finding(WARNING, text, f"pip uninstall -y {names}; then {install}")
    if not here.packages and "version" not in answer:
        return Finding(UNUSABLE, "not installed: only the backend nccl needs it", install if here.has_gpu else "")
    package = here.packages[0] if here.packages else "cupy"
    again = f"pip uninstall -y {package}; then {install}"
    if "error" in answer:
        return Finding(UNUSABLE, f"{package} does not load: {answer['error']}", again)
    text = f"{package} {answer['version']}"
    if int(answer["version"].partition(".")[0]) < _OLDEST_CUPY:
        return Finding(UNUSABLE, f"{text}; gradsync needs CuPy {_OLDEST_CUPY} or newer", again)
    runtime = answer.get("runtime", 0)
    text += f", CUDA runtime {_cuda(runtime)}" if runtime else ""
    if not here.has_gpu:
        advice = "on a machine with a GPU: install NVIDIA's driver; for a container: docker run --gpus all"
        return Finding(UNUSABLE, f"{text}; this machine has no NVIDIA driver", advice)
    if "count" not in answer:
        why = answer.get("count_error", "unknown reason")
        advice = "compare the CUDA versions of nvidia-smi and of the CuPy package"
        return Finding(UNUSABLE, f"{text}; CuPy sees no GPU: {why}", advice)
    if driver and driver // 1000 < runtime // 1000:
        text += f", but the driver supports CUDA only up to {_cuda(driver)}"
        return Finding(WARNING, text, f"update the driver, or: {again}")
    if "nvrtc" not in answer:
        return Finding(UNUSABLE, f"{text}; NVRTC, which compiles CuPy's kernels, is missing", f"{install} includes it")
    return Finding(OK, text)


def _nccl(here: Facts) -> Finding | None:
    """Checks that CuPy has loaded NCCL, that CuPy was built with the same major version, and NCCL_COMM_BLOCKING."""
    answer = here.answer("cupy")
    if "version" not in answer:
        return None  # the line of CuPy tells it
    if here.environ.get("NCCL_COMM_BLOCKING") == "0":
        text = "NCCL_COMM_BLOCKING=0 is set, but CuPy supports only blocking communicators"
        return Finding(UNUSABLE, text, "unset NCCL_COMM_BLOCKING")
    wheel = f"nvidia-nccl-cu{13 if 'cupy-cuda13x' in here.packages else 12}"
    found = answer.get("nccl")
    if not found:
        text = answer.get("nccl_error", "CuPy could not load libnccl.so.2")
        return Finding(UNUSABLE, text, f"pip install {wheel}")
    text = f"{found['version']} from {found['path']}, CuPy was built with {found['build']}"
    if found["version"].partition(".")[0] != found["build"].partition(".")[0]:
        return Finding(WARNING, f"{text}: the major versions differ", f"pip install --upgrade {wheel}")
    return Finding(OK, text)


def _launcher(here: Facts) -> Finding:
    """Checks that no environment variable gives this shell a rank, because then each script would run as this rank."""
    try:
        launchers.read_master_port(here.environ)
        place = launchers.read_environment(here.environ)
    except InvalidArgument as error:
        return Finding(BROKEN, str(error).replace("\n", " "), "unset the environment variables that this error names")
    if place is None:
        return Finding(OK, "this shell is not inside a launched job")
    setter = {"RANK": "torchrun or you", "gradsync": "gradsync run"}.get(place.source, place.source)
    text = f"this shell is rank {place.rank} of {place.world_size}, according to variables that {setter} set"
    names = [name for name in ("RANK", "WORLD_SIZE") if name in here.environ]
    advice = "inside a job these variables are right" + (f"; elsewhere: unset {' '.join(names)}" if names else "")
    return Finding(WARNING, text, advice)


def _variables(here: Facts) -> list[Finding]:
    """Returns one finding for each wrong variable; if all are right, one that shows them."""
    wrong = [
        Finding(BROKEN, str(error), f"unset {name}", name)
        for name, error in environment.refused_variables(here.environ)
    ]
    for name, meant in environment.unknown_variables(here.environ).items():
        advice = f"unset {name}" if meant is None else f'export {meant}="${name}"; unset {name}'
        wrong.append(Finding(WARNING, environment.describe_unknown(meant), advice, name))
    present = sorted(name for name in here.environ if name.startswith("GRADSYNC_"))
    shown = ", ".join(name if name == environment.SECRET else f"{name}={here.environ[name]}" for name in present)
    return wrong or [Finding(OK, shown or "no GRADSYNC_* variable is set")]


Check = Callable[[Facts], Finding | list[Finding] | None]

#: The checks, by the name of the line in the report, in the order of the report.
CHECKS: dict[str, Check] = {
    "Python": _python,
    "kernels": _kernels,
    "/dev/shm": _shared_memory_folder,
    "cores": _cores,
    "MPI": _mpi,
    "GPUs": _gpus,
    "CuPy": _cupy,
    "NCCL": _nccl,
    "launcher": _launcher,
    "GRADSYNC_*": _variables,
}


def examine(here: Facts, checks: Mapping[str, Check] = CHECKS) -> list[Finding]:
    """Runs all checks. If a check raises an exception, a finding reports the exception."""
    findings: list[Finding] = []
    for what, check in checks.items():
        try:
            found = check(here)
        except Exception as error:
            text = f"this check failed: {type(error).__name__}: {error}"
            found = Finding(WARNING, text, "please report this error; the other lines are not affected")
        lines = found if isinstance(found, list) else [] if found is None else [found]
        findings += [replace(finding, what=finding.what or what) for finding in lines]
    return findings


# -- What another process answers --------------------------------------------------------------------------------------


def _ask_kernels() -> dict[str, Any]:
    from gradsync.communicators.shared_memory.compiled import RUNNING

    return RUNNING._asdict()


def _ask_mpi() -> dict[str, Any]:
    import mpi4py

    from gradsync.communicators.mpi.job import load_mpi

    first = load_mpi().Get_library_version().strip("\0 \n").splitlines()[0]
    return {
        "version": mpi4py.__version__,
        "library": " ".join(first.partition(",")[0].replace("Version:", "").split()),
    }


def _ask_cupy() -> dict[str, Any]:
    """Examines CuPy. If one question fails, the error is noted, and the others are asked."""
    import cupy

    from gradsync.communicators.nccl.library import library_path, version_text

    runtime, nccl = cupy.cuda.runtime, cupy.cuda.nccl
    found: dict[str, Any] = {"version": cupy.__version__}

    def device(number: int) -> dict[str, Any]:
        properties, others = runtime.getDeviceProperties(number), set(range(found["count"])) - {number}
        return {
            "name": properties["name"].decode(errors="replace"),
            "memory_bytes": int(properties["totalGlobalMem"]),
            "peers": sum(runtime.deviceCanAccessPeer(number, other) for other in others),
        }

    questions: dict[str, Callable[[], Any]] = {
        "runtime": runtime.runtimeGetVersion,
        "driver": runtime.driverGetVersion,
        "count": runtime.getDeviceCount,
        "nvrtc": lambda: list(cupy.cuda.nvrtc.getVersion()),
        "devices": lambda: list(map(device, range(found["count"]))),
        # The first of these loads the library.
        "nccl": lambda: (
            nccl.available
            and {
                "version": version_text(nccl.get_version()),
                "build": version_text(nccl.get_build_version()),
                "path": library_path(),
            }
        ),
    }
    for name, question in questions.items():
        try:
            found[name] = question()
        except Exception as error:
            found[f"{name}_error"] = f"{type(error).__name__}: {error}"
    return found


_QUESTIONS = {"kernels": _ask_kernels, "mpi": _ask_mpi, "cupy": _ask_cupy}


def _answer(name: str, mpiexec: str | None, deadline_seconds: float) -> dict[str, Any]:
    """Asks in another process; never raises. Returns what it answered, or {"error": why there is no answer}."""
    try:
        if name == "mpiexec":
            return {"text": _call([mpiexec, "--version"], deadline_seconds).stdout} if mpiexec else {}
        done = _call([sys.executable, "-m", "gradsync.doctor", "ask", name], deadline_seconds)
        if done.returncode == 0:
            found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
            return found
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {deadline_seconds:.0f} s"}
    except (OSError, ValueError, IndexError) as error:
        return {"error": f"no answer: {error}"}
    code = done.returncode
    how = f"ended with exit code {code}" if code > 0 else f"was killed by {signal.Signals(-code).name}"
    last = "".join(f": {line.strip()}" for line in done.stderr.strip().splitlines()[-1:])
    return {"error": f"the process that imported it {how}{last}"}


def _call(
    command: Sequence[str], deadline_seconds: float, variables: Mapping[str, str] = {}
) -> subprocess.CompletedProcess[str]:
    """Runs a command without the variables of launchers. At the deadline it is killed; ranks end with their launcher.

    It stays in the session of this process, so that Ctrl-C ends it too.
    """
    return subprocess.run(
        command,
        env=launchers.without_launcher() | dict(variables),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=deadline_seconds,
    )


def _in_parallel(function: Callable[[str], _Result], names: Iterable[str]) -> dict[str, _Result]:
    names = list(names)
    with ThreadPoolExecutor() as pool:
        return dict(zip(names, pool.map(function, names), strict=True))


def _collect_facts() -> Facts:
    mpiexec, folder, packages = launchers.find_mpiexec(), None, []
    with contextlib.suppress(OSError):
        stat = os.statvfs("/dev/shm")
        folder = stat.f_frsize * stat.f_blocks, stat.f_frsize * stat.f_bavail
    for name in _CUPY_PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            importlib.metadata.distribution(name)
            packages.append(name)
    return Facts(
        environ=dict(os.environ),
        system=sys.platform,
        machine=platform.machine(),
        cores=usable_cores(),
        packages=packages,
        answers=_in_parallel(lambda name: _answer(name, mpiexec, 6.0), (*_QUESTIONS, "mpiexec")),
        shared_memory_bytes=folder,
        mpiexec=mpiexec,
    )


# -- The trials --------------------------------------------------------------------------------------------------------

# Without these variables Open MPI refuses to run as root (the usual user in a container), and to start more ranks than
# there are cores.
_OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}


def try_backend(backend: str, here: Facts, findings: Sequence[Finding], deadline_seconds: float) -> Finding:
    """Lets two ranks all-reduce with a backend, or one rank where a second has no GPU, or needs none.

    Returns:
        OK if the backend works, BROKEN if it does not, and UNUSABLE if the checks say that it cannot.
    """
    row = TABLE[backend]
    if row.on_gpus and not here.has_gpu:
        return Finding(UNUSABLE, "this machine has no NVIDIA GPU")
    for finding in findings:
        if finding.what in row.doctor_lines and finding.status is UNUSABLE:
            return Finding(UNUSABLE, f'see the line "{finding.what}"')
    ranks = 1 if row.single_rank or (row.on_gpus and count_gpus(here.environ) < 2) else 2
    module = ["-m", "gradsync.doctor", "try", backend]
    if row.under_mpiexec:
        words = ["mpiexec", "-n", str(ranks), "python", *module]
        command = [str(here.mpiexec), "-n", str(ranks), sys.executable, *module]
    else:
        words = ["gradsync", "run", "-n", str(ranks), "--backend", backend, *module]
        command = [sys.executable, "-m", *words]
    advice = f"see the whole error: {' '.join(words)}"
    try:
        done = _call(command, deadline_seconds, _OPEN_MPI)
    except OSError as error:
        return Finding(BROKEN, f"{type(error).__name__}: {error}")
    except subprocess.TimeoutExpired:
        return Finding(BROKEN, f"no answer within {deadline_seconds:.0f} s", advice)
    if done.returncode:
        return Finding(BROKEN, _cause(done), advice)
    if ranks == 2:
        return Finding(OK, "works: 2 ranks summed arrays of 16 MB")
    alone = "" if row.single_rank else "; this machine has one GPU, and each rank needs its own GPU"
    return Finding(OK, f"works with one rank{alone}")


def _cause(done: subprocess.CompletedProcess[str]) -> str:
    """Returns the error of a failed trial: a rank's last exception, else what gradsync run says, else the exit code."""
    lines = [line.strip() for line in done.stderr.splitlines()]
    of_ranks = [line for line in lines if re.match(r"[\w.]*[A-Z]\w+: ", line)]
    of_launcher = [line for line in lines if re.match(r"gradsync: (error|rank)", line)]
    cause = (of_ranks[-1:] or of_launcher or [f"the command ended with exit code {done.returncode}"])[0]
    return re.sub(r"^gradsync(\.errors\.|: error: |: )", "", cause).rstrip(":")


def _try(backend: str) -> None:
    """All-reduces as one rank of a trial."""
    length, period = 4 * 1024**2, 1009  # 16 MB of float32; a prime, so that data at a wrong offset are wrong too

    def values(rank: int) -> Any:  # small integers, so that no sum is rounded
        return np.resize(np.random.default_rng(rank).integers(1, 9, period).astype(np.float32), length)

    with gs.init_process_group(backend) as comm:
        xp: Any = np
        if comm.device != "cpu":
            import cupy

            xp = cupy
        wrong = 0
        for _ in range(2):  # the second call uses what the first one has stored
            result = comm.all_reduce(xp.asarray(values(comm.rank)))
            on_host = result if xp is np else result.get()
            wrong = max(wrong, int(np.count_nonzero(on_host != sum(map(values, range(comm.world_size))))))
    # After the block, in which an error would also end the other ranks, and hide whether their results are wrong.
    if wrong:
        raise GradsyncError(f"{wrong:,} of {length:,} sums on rank {comm.rank} are wrong")


# -- The command -------------------------------------------------------------------------------------------------------

_STYLES = {OK: "green", WARNING: "yellow", UNUSABLE: "dim", BROKEN: "bold red"}


def doctor(*, backend: str | None, as_json: bool, deadline_seconds: float, tries: bool, verbose: bool) -> int:
    """Runs `gradsync doctor` with its options; returns the exit code: 0 if the machine is ready, otherwise 1."""
    began = time.monotonic()
    here = _collect_facts()
    findings = examine(here)
    named = here.environ.get(environment.BACKEND)
    asked_for = backend or (named if named in TABLE else None)
    # One rank alone works wherever NumPy does, so this is tried only if it is asked for.
    names = [name for name, row in TABLE.items() if name in (backend, asked_for) or not row.single_rank]
    names = [name for name in names if tries and backend in (None, name)]
    trials = _in_parallel(lambda name: try_backend(name, here, findings, deadline_seconds), names)
    working = [name for name, trial in trials.items() if trial.status is OK]
    is_well, verdict = _verdict(findings, trials, working, asked_for)
    seconds = time.monotonic() - began
    if as_json:
        found = {"ready": is_well, "verdict": verdict, "asked_for": asked_for, "working": working, "seconds": seconds}
        found["findings"] = list(map(vars, findings))
        found["trials"] = {name: vars(trial) for name, trial in trials.items()}
        print(json.dumps(found, indent=2))
    else:
        _show(findings, trials, verbose)
        print(f"{verdict} ({seconds:.1f} s)")
    return 0 if is_well else 1


def _verdict(
    findings: Sequence[Finding], trials: Mapping[str, Finding], working: Sequence[str], asked_for: str | None
) -> tuple[bool, str]:
    """Returns whether the machine is ready, and the last line of the report."""
    broken = [finding.what for finding in findings if finding.status is BROKEN]
    if broken:
        return False, f"Not ready: fix {', '.join(broken)} first."
    if not trials:
        return True, "Nothing is broken; no backend was tried."
    if asked_for:
        works = asked_for in working
        return works, f"Ready: {asked_for} works here." if works else f"Not ready: {asked_for} does not work here."
    if working:
        return True, f"Ready: {', '.join(working)} can be used here."
    return False, "Not ready: no backend for two or more ranks works here."


def _show(findings: Sequence[Finding], trials: Mapping[str, Finding], verbose: bool) -> None:
    """Prints the lines; without `verbose`, leaves out the findings that report no problem."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    lines = Table(box=None, show_header=False, padding=(0, 1), pad_edge=False)
    lines.add_column(no_wrap=True)
    lines.add_column(no_wrap=True)
    lines.add_column(overflow="fold")
    shown = [finding for finding in findings if verbose or finding.status is not OK]
    for each in [*shown, *(replace(trial, what=f"backend {name}") for name, trial in trials.items())]:
        text = Text(each.text)
        if each.advice:
            text.append(f"\n-> {each.advice}", "cyan")
        lines.add_row(Text(each.status.value, _STYLES[each.status]), each.what, text)
    console.print(lines)
    fine = len(findings) - len(shown)
    console.print(f"\n{fine} more {'line is' if fine == 1 else 'lines are'} fine: -v shows them." if fine else "")


def _main(what: str, name: str) -> None:
    """Runs one question or one rank of a trial: `python -m gradsync.doctor ask mpi`, or `try mpi`."""
    if what == "try":
        _try(name)
        return
    try:
        answer = _QUESTIONS[name]()
    except (ImportError, GradsyncError) as error:
        answer = {"error": str(error)}
    print(json.dumps(answer))


if __name__ == "__main__":
    _main(*sys.argv[1:])
