"""The recipes for schedulers, run on this machine with stand-ins for what a cluster has."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

import gradsync as gs

ROOT = Path(__file__).parents[3]
CLUSTERS = ROOT / "examples" / "clusters"
SCRIPT = str(ROOT / "examples" / "own_loop.py")
LEARNT = "weights [1. 2. 3.], bias [4.]"
SECONDS = 100.0

# One machine plays both nodes. What srun sets is what Slurm documents for its tasks.
PROGRAMS = {
    "gradsync": f'exec {sys.executable} -m gradsync "$@"',
    "python": f'exec {sys.executable} "$@"',
    "scontrol": 'if [ "$1 $2" = "show hostnames" ]; then echo 127.0.0.1; echo other; fi',
    "ssh": 'shift; exec bash -c "$*"',
    "srun": """
    pids=
    for task in 0 1; do
        node=$((task * (SLURM_NNODES - 1)))
        SLURM_PROCID=$task SLURM_LOCALID=$((task - node)) SLURM_NODEID=$node "$@" & pids="$pids $!"
    done
    code=0
    for pid in $pids; do wait "$pid" || code=$?; done
    exit $code""",
}


@pytest.fixture
def cluster(tmp_path: Path) -> dict[str, str]:
    """The variables of a shell on a cluster whose programs are ours."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in PROGRAMS.items():
        (programs / name).write_text(f"#!/bin/bash\n{text}\n")
        (programs / name).chmod(0o755)
    runtime = tmp_path / "runtime"
    runtime.mkdir(mode=0o700)
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(("GRADSYNC_", "SLURM_"))},
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": str(Path(gs.__file__).parents[1]),
        "HOME": str(tmp_path),
        "XDG_RUNTIME_DIR": str(runtime),
        "RANKS_PER_NODE": "1",
        "GRADSYNC_BACKEND": "shm",  # nodes are taken for different machines
    }


@contextmanager
def port() -> Iterator[str]:
    """A port that nobody else on this machine is given meanwhile: a socket that does not listen keeps it."""
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        yield str(reserved.getsockname()[1])


def run(command: list[str], variables: dict[str, str]) -> str:
    done = subprocess.run(
        command, env=variables, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def of_slurm(nodes: int) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_NNODES": str(nodes),
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_STEP_NODELIST": "node[1-2]",
        "SLURM_STEP_TASKS_PER_NODE": "2" if nodes == 1 else "1(x2)",
    }


def test_slurm_starts_each_rank(cluster: dict[str, str]) -> None:
    assert f"2 ranks over shm: {LEARNT}" in run([str(CLUSTERS / "slurm.sh"), SCRIPT], {**cluster, **of_slurm(1)})


def test_slurm_starts_a_launcher_on_each_node(cluster: dict[str, str]) -> None:
    with port() as number:
        told = run([str(CLUSTERS / "slurm_launcher.sh"), SCRIPT], {**cluster, **of_slurm(2), "PORT": number})
    assert f"2 ranks over shm: {LEARNT}" in told
    assert list(Path(cluster["HOME"]).glob("gradsync.*")) == []  # the secret


def test_ssh_starts_a_launcher_on_each_host(cluster: dict[str, str]) -> None:
    with port() as number:
        told = run([str(CLUSTERS / "ssh.sh"), "127.0.0.1 127.0.0.1", SCRIPT], {**cluster, "PORT": number})
    assert f"2 ranks over shm: {LEARNT}" in told


def test_the_ranks_end_with_the_script_that_reached_them_by_ssh(cluster: dict[str, str], tmp_path: Path) -> None:
    script = tmp_path / "waits.py"
    script.write_text(
        "import time\nimport gradsync as gs\n"
        "with gs.init_process_group() as comm:\n    comm.barrier()\n"
        "    if comm.rank == 0:\n        print('all have met', flush=True)\n"
        f"    time.sleep({10 * SECONDS})\n"
    )
    with port() as number:
        command = [str(CLUSTERS / "ssh.sh"), "127.0.0.1 127.0.0.1", str(script)]
        environment = {**cluster, "PORT": number, "TMPDIR": str(tmp_path)}
        with subprocess.Popen(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert "all have met" in process.stdout.readline()
            process.kill()
            process.wait(SECONDS)
            process.communicate(timeout=SECONDS)  # until nobody holds the pipe
    assert not list(tmp_path.glob("tmp.*"))  # the secrets


def test_ssh_without_a_script_says_how(cluster: dict[str, str]) -> None:
    done = subprocess.run([CLUSTERS / "ssh.sh", "node1"], env=cluster, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.startswith("usage: ")) == (2, True)


def test_kubernetes_starts_a_launcher_in_each_pod(cluster: dict[str, str], tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    service, job = yaml.safe_load_all((CLUSTERS / "kubernetes.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    assert service["metadata"]["name"] == pod["subdomain"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 2
    [container] = pod["containers"]
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    variables = {entry["name"]: entry["value"] for entry in container["env"]}
    assert variables["RENDEZVOUS"].startswith(f"{job['metadata']['name']}-0.{pod['subdomain']}:")
    secret = tmp_path / "mounted"
    secret.write_text("5" * 64)
    with port() as number, ExitStack() as ending:
        variables |= {"RANKS_PER_NODE": "1", "RENDEZVOUS": f"127.0.0.1:{number}"}
        pods = []
        for index in "01":
            own = str(tmp_path / f"secret{index}")
            *shell, text = container["command"]
            text = text.replace("/secrets/secret", str(secret)).replace("/tmp/gradsync.secret", own)
            command = [*shell, text.replace("train.py", SCRIPT)]
            environment = {**cluster, **variables, "JOB_COMPLETION_INDEX": index}
            pods.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
            ending.callback(pods[-1].kill)
        told = [process.communicate(timeout=SECONDS)[0] for process in pods]
    assert [process.returncode for process in pods] == [0, 0]
    assert f"2 ranks over shm: {LEARNT}" in told[0]


@pytest.mark.parametrize(("library", "example"), [("distributed", "dask_workers.py"), ("ray", "ray_workers.py")])
def test_workers_are_ranks(cluster: dict[str, str], library: str, example: str) -> None:
    if subprocess.run([sys.executable, "-c", f"import {library}"], capture_output=True, check=False).returncode:
        pytest.skip(f"{library} is not installed: pip install {library}")
    told = run([sys.executable, str(ROOT / "examples" / "workers" / example)], cluster)
    assert told.strip() == "[[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]]"
