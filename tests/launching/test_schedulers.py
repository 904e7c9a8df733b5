"""The recipes of examples/clusters and examples/workers, on this machine, with stand-ins for what a cluster has."""

import importlib.util
import os
import shutil
import sys
from pathlib import Path

import pytest

import gradsync as gs
from commands import wait_until

ROOT = Path(__file__).parents[2]
CLUSTERS = ROOT / "examples" / "clusters"
SCRIPT = ROOT / "examples" / "own_loop.py"
LEARNT = "2 ranks over shm: weights [1. 2. 3.], bias [4.]"

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

pytestmark = pytest.mark.skipif(not shutil.which("bash"), reason="needs bash")


@pytest.fixture
def cluster(cli, tmp_path):
    """Starts a command in a shell on a cluster whose programs are ours."""
    (tmp_path / "bin").mkdir()
    for name, text in PROGRAMS.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "runtime").mkdir(mode=0o700)
    nothing = {name: None for name in os.environ if name.startswith(("GRADSYNC_", "SLURM_"))}
    shell = nothing | {
        "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
        "PYTHONPATH": str(Path(gs.__file__).parents[1]),
        "HOME": str(tmp_path),
        "TMPDIR": str(tmp_path),
        "XDG_RUNTIME_DIR": str(tmp_path / "runtime"),
        "RANKS_PER_NODE": "1",
        "GRADSYNC_BACKEND": "shm",  # nodes are taken for different machines
        "PORT": str(gs.free_port()),
    }

    def start(*command, **variables):
        return cli.start_program(*command, environment=shell | variables, cwd=ROOT)

    return start


def slurm(nodes):
    return {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_NNODES": str(nodes),
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_STEP_NODELIST": "node[1-2]",
        "SLURM_STEP_TASKS_PER_NODE": "2" if nodes == 1 else "1(x2)",
    }


def has_learnt(process):
    code, out, err = process.result()
    assert (code, LEARNT in out) == (0, True), out + err


@pytest.mark.slow
def test_slurm_starts_each_rank(cluster):
    has_learnt(cluster(CLUSTERS / "slurm.sh", SCRIPT, **slurm(1)))


def test_slurm_s_tasks_have_as_many_threads_as_cores(cluster, script):
    path = script("""
        import os
        os.write(1, f"{os.environ['OMP_NUM_THREADS']} {os.environ['SRUN_CPUS_PER_TASK']}\\n".encode())  # at once
    """)
    code, out, err = cluster(CLUSTERS / "slurm.sh", path, **slurm(1), SLURM_CPUS_PER_TASK="3").result()
    assert (code, out) == (0, "3 3\n3 3\n"), err
    code, out, err = cluster(CLUSTERS / "slurm.sh", path, **slurm(1)).result()
    assert (code, out) == (0, "1 1\n1 1\n"), err


@pytest.mark.slow
def test_slurm_starts_a_launcher_on_each_node(cluster, tmp_path):
    has_learnt(cluster(CLUSTERS / "slurm_launcher.sh", SCRIPT, **slurm(2)))
    assert list(tmp_path.glob("gradsync.*")) == []  # the secret


def test_ssh_starts_a_launcher_on_each_host_whose_ranks_end_with_the_script(cluster, script, tmp_path):
    path = script(
        """
        import os, time
        import gradsync as gs
        with gs.init_process_group() as comm:
            comm.barrier()
            os.write(1, b"all have met\\n")
            time.sleep(1000)
        """
    )
    process = cluster(CLUSTERS / "ssh.sh", "127.0.0.1 127.0.0.1", path)
    process.read_until("all have met")
    process.kill()
    process.wait(60)
    process.communicate(timeout=60)  # until nobody holds the pipe
    wait_until(lambda: not list(tmp_path.glob("tmp.*")), "the end of the secrets")


@pytest.mark.slow
def test_ssh_trains_and_without_a_script_says_how(cluster):
    has_learnt(cluster(CLUSTERS / "ssh.sh", "127.0.0.1 127.0.0.1", SCRIPT))
    code, _, err = cluster(CLUSTERS / "ssh.sh", "node1").result()
    assert (code, err.startswith("usage: ")) == (2, True)


@pytest.mark.slow
def test_kubernetes_starts_a_launcher_in_each_pod(cluster, tmp_path):
    yaml = pytest.importorskip("yaml")
    service, job = yaml.safe_load_all((CLUSTERS / "kubernetes.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    assert service["metadata"]["name"] == pod["subdomain"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 2
    [container] = pod["containers"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    variables = {entry["name"]: entry["value"] for entry in container["env"]}
    assert variables["RENDEZVOUS"].startswith(f"{job['metadata']['name']}-0.{pod['subdomain']}:")
    (tmp_path / "mounted").write_text("5" * 64)
    variables |= {"RANKS_PER_NODE": "1", "RENDEZVOUS": f"127.0.0.1:{gs.free_port()}"}
    pods = []
    for index in "01":
        *shell, text = container["command"]
        text = text.replace("/secrets/secret", str(tmp_path / "mounted"))
        text = text.replace("/tmp/gradsync.secret", str(tmp_path / f"secret{index}")).replace("train.py", str(SCRIPT))
        pods.append(cluster(*shell, text, **variables, JOB_COMPLETION_INDEX=index))
    results = [each.result() for each in pods]
    assert [result.code for result in results] == [0, 0]
    assert LEARNT in results[0].out


@pytest.mark.slow
@pytest.mark.parametrize(("library", "example"), [("distributed", "dask_workers.py"), ("ray", "ray_workers.py")])
def test_workers_are_ranks(library, example, cluster):
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    code, out, err = cluster(sys.executable, ROOT / "examples" / "workers" / example).result()
    assert (code, out.strip()) == (0, "[[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]]"), err
