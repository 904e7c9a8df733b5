"""The main job: training on several ranks is the training of one process, whatever the number of ranks."""

import hashlib
import importlib.util
import os
import re
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from gradsync.communicators.local import local_communicator
from rank_processes import run_ranks

threadpoolctl = pytest.importorskip("threadpoolctl", reason="it comes with the extra examples, as scikit-learn does")

EXAMPLES = Path(__file__).parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES))  # rank processes import this module too

from train_digits import Settings, train  # noqa: E402

SCRIPT = EXAMPLES / "train_digits.py"


(SKLEARN,) = importlib.util.find_spec("sklearn").submodule_search_locations
#: Stands in for sklearn.datasets: its digits, without its import, which takes longer than an epoch.
DATASETS = f"""
import gzip
import types

import numpy as np


def load_digits():
    with gzip.open({str(Path(SKLEARN, "datasets", "data", "digits.csv.gz"))!r}, "rt") as file:
        table = np.loadtxt(file, delimiter=",")
    return types.SimpleNamespace(images=table[:, :-1].reshape(-1, 8, 8), target=table[:, -1].astype(int))
"""


@contextmanager
def digits_alone():
    datasets = ModuleType("sklearn.datasets")
    exec(DATASETS, vars(datasets))
    stand_ins = {"sklearn": ModuleType("sklearn"), "sklearn.datasets": datasets}
    kept = {name: sys.modules.get(name) for name in stand_ins}
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for name, module in kept.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def train_quietly(comm, on_step=None, **settings):
    # Ranks share the cores, and one BLAS thread has one order of summation.
    with threadpoolctl.threadpool_limits(1), digits_alone():
        return train(comm, Settings(quiet=True, **settings), on_step)


def digest(parameters):
    return hashlib.sha256(b"".join(array.tobytes() for array in parameters.values())).hexdigest()


# -- The network and its data, in one process ----------------------------------------------------------------


# -- Several ranks equal one ---------------------------------------------------------------------------------


def train_both_ways(comm):
    """Trains in float32 and looks at each step's gradients; trains again in float64 and gives the parameters.

    The deviation is the largest in any step from the gradient of the whole batch, relative to the largest element
    of that parameter's gradient.
    """
    deviations = []

    def compare(network, batch, reduced):
        for name, whole in network.backward(network.forward(batch.images), batch.labels):
            deviations.append(np.abs(reduced[name] - whole).max() / np.abs(whole).max())

    single = train_quietly(comm, compare, epochs=1)
    double = train_quietly(comm, epochs=1, dtype="float64")
    return {
        "digests": (digest(single.parameters), digest(double.parameters)),
        "identical": single.identical and double.identical,
        "deviations": deviations,
        "float64": double.parameters,
    }


@pytest.mark.parametrize("world_size", [2])
def test_ranks_train_as_one_process_does(world_size):
    alone = train_quietly(local_communicator(), epochs=1, dtype="float64").parameters
    results = run_ranks(world_size, train_both_ways, backend="shm")
    assert len({result["digests"] for result in results}) == 1
    for result in results:
        assert result["identical"]
        assert len(result["deviations"]) == 30 * 8  # steps, parameters
        assert max(result["deviations"]) < 1e-5
        for name, expected in alone.items():
            assert np.abs(result["float64"][name] - expected).max() < 1e-9, name


# -- As a user runs it ---------------------------------------------------------------------------------------


NO_GPUS = {"CUDA_VISIBLE_DEVICES": ""}


def run_script(*command, variables=NO_GPUS, timeout=100):
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment |= {"NO_COLOR": "1", "OMP_NUM_THREADS": "1", **variables}
    run = subprocess.run(
        [sys.executable, *map(str, command)], env=environment, capture_output=True, text=True, timeout=timeout
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def row(table, label):
    (value,) = re.findall(rf"^(?:\[rank 0\] )?{label}  +(.*)$", table, re.MULTILINE)
    return value


def test_two_ranks_reach_97_percent(tmp_path):
    (tmp_path / "sklearn").mkdir()
    (tmp_path / "sklearn" / "__init__.py").touch()
    (tmp_path / "sklearn" / "datasets.py").write_text(DATASETS)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = ("-m", "gradsync", "run", "-n", "2", SCRIPT, "--epochs", "15")
    output = run_script(*command, variables={**NO_GPUS, "PYTHONPATH": path})
    assert row(output, "ranks") == "2"
    assert row(output, "backend") == "shm, on cpu"
    assert row(output, "buckets") == "3 all-reduces a step"
    assert row(output, "parameters on all ranks") == "identical"
    assert float(row(output, "test accuracy").rstrip("%")) >= 97
    assert output.count("test accuracy") == 4  # every fifth epoch, and the table
    assert "[rank 0] \n" not in output


def test_script_alone_is_one_process():
    output = run_script(SCRIPT, "--epochs", "1", "--quiet")
    assert row(output, "ranks") == "1"
    assert row(output, "backend") == "local, on cpu"
    assert output.count("test accuracy") == 1


# -- On a GPU ------------------------------------------------------------------------------------------------

# A first run compiles CuPy's kernels; ranks that share a GPU may take milliseconds for each collective.
GPU_SECONDS = 400


def train_on_gpu(comm):
    result = train_quietly(comm, epochs=1, dtype="float64")
    return result.identical, {name: array.get() for name, array in result.parameters.items()}


@pytest.mark.gpu
@pytest.mark.timeout(GPU_SECONDS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_ranks_on_a_gpu_train_as_one_process_on_the_cpu_does(world_size):
    alone = train_quietly(local_communicator(), epochs=1, dtype="float64").parameters
    results = run_ranks(world_size, train_on_gpu, backend="nccl", allow_shared_gpu=True, timeout=GPU_SECONDS / 2)
    for identical, parameters in results:
        assert identical
        for name, expected in alone.items():
            assert np.abs(parameters[name] - expected).max() < 1e-8, name


@pytest.mark.gpu
@pytest.mark.timeout(GPU_SECONDS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_on_a_gpu_reach_97_percent(ranks):
    output = run_script(
        *("-m", "gradsync", "run", "-n", ranks, "--backend", "nccl", SCRIPT),
        variables={"GRADSYNC_ALLOW_SHARED_GPU": "1"},
        timeout=GPU_SECONDS / 2,
    )
    assert row(output, "ranks") == str(ranks)
    assert row(output, "backend") == "nccl, on cuda:0"
    assert row(output, "buckets") == "3 all-reduces a step"
    assert row(output, "parameters on all ranks") == "identical"
    assert float(row(output, "test accuracy").rstrip("%")) >= 97
