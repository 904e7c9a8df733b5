"""The main job: training on several ranks is the training of one process, whatever the number of ranks."""

import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import gradsync as gs
from gradsync.communicators.local import LocalCommunicator
from rank_processes import run_ranks

threadpoolctl = pytest.importorskip("threadpoolctl", reason="it comes with the extra examples")

EXAMPLES = Path(__file__).parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES))  # rank processes import this module too

import train_digits  # noqa: E402
from digits_network import Network  # noqa: E402
from train_digits import Settings, train  # noqa: E402

SCRIPT = EXAMPLES / "train_digits.py"
GRADIENT_BYTES = 38_282 * 4


def train_quietly(comm, on_step=None, **settings):
    # Ranks share the cores, and one BLAS thread has one order of summation.
    with threadpoolctl.threadpool_limits(1):
        return train(comm, Settings(quiet=True, **settings), on_step)


def digest(parameters):
    return hashlib.sha256(b"".join(array.tobytes() for array in parameters.values())).hexdigest()


# -- The network and its data, in one process ----------------------------------------------------------------


def loss(network, images, labels):
    logits = network.forward(images)
    logits = logits - logits.max(axis=1, keepdims=True)
    return np.mean(np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(len(labels)), labels])


def test_backward_pass_equals_finite_differences():
    rng = np.random.default_rng(1)
    network = Network(np, "float64", seed=2)
    for parameter in network.parameters.values():  # biases too away from zero
        parameter += 0.1 * rng.standard_normal(parameter.shape)
    images, labels = rng.random((6, 8, 8, 1)), rng.integers(0, 10, 6)
    gradients = dict(network.backward(network.forward(images), labels))
    assert gradients.keys() == network.parameters.keys()
    for name, parameter in network.parameters.items():
        for _ in range(3):  # a slope along a random direction checks all elements at once
            direction = rng.standard_normal(parameter.shape)
            direction *= 1e-5 / np.linalg.norm(direction)
            parameter += direction
            ahead = loss(network, images, labels)
            parameter -= 2 * direction
            behind = loss(network, images, labels)
            parameter += direction
            slope = np.sum(gradients[name] * direction)
            scale = np.linalg.norm(gradients[name]) * np.linalg.norm(direction)
            assert (ahead - behind) / 2 == pytest.approx(slope, abs=1e-6 * scale), name


def test_gradients_come_last_layer_first():
    network = Network(np, "float32", seed=0)
    images = np.random.default_rng(0).random((2, 8, 8, 1), np.float32)
    backward = network.backward(network.forward(images), np.array([3, 7]))
    layers = [name.partition(".")[0] for name, gradient in backward]
    assert layers == ["dense2"] * 2 + ["dense1"] * 2 + ["conv2"] * 2 + ["conv1"] * 2


def test_gradients_have_the_dtype_and_shape_of_their_parameters():
    for dtype in ("float32", "float64"):
        network = Network(np, dtype, seed=0)
        images = np.random.default_rng(0).random((2, 8, 8, 1)).astype(dtype)
        for name, gradient in network.backward(network.forward(images), np.array([3, 7])):
            parameter = network.parameters[name]
            assert (gradient.dtype, gradient.shape) == (parameter.dtype, parameter.shape), name


def test_split_is_stratified_and_follows_the_seed():
    train_set, test_set = train_digits.load_data(0, "float32")
    per_digit = np.bincount(train_set.labels) + np.bincount(test_set.labels)
    assert per_digit.sum() == 1797
    assert np.array_equal(np.bincount(test_set.labels), per_digit // 5)
    assert np.array_equal(train_digits.load_data(0, "float32")[1].images, test_set.images)
    assert not np.array_equal(train_digits.load_data(1, "float32")[1].images, test_set.images)


@pytest.mark.parametrize(("threshold_bytes", "buckets"), [(1, 8), (20 * 1024, 3), (1024**2, 1)])
def test_threshold_decides_the_number_of_all_reduces(threshold_bytes, buckets):
    result = train_quietly(LocalCommunicator(), epochs=1, threshold_bytes=threshold_bytes)
    assert result.statistics.all_reduces == buckets * result.steps
    assert result.statistics.bytes_all_reduced == GRADIENT_BYTES * result.steps


@pytest.mark.parametrize(("global_batch", "fits"), [(61, 60), (2000, 1442), (1, 2)])
def test_batch_that_ranks_cannot_share_is_refused(global_batch, fits):
    comm = LocalCommunicator()
    comm.world_size = 2  # refused before anything is sent
    with pytest.raises(
        gs.InvalidArgument, match=f"multiple of the 2 ranks.*got {global_batch}; --global-batch {fits} fits"
    ):
        train_quietly(comm, global_batch=global_batch)


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

    single = train_quietly(comm, compare, epochs=2)
    double = train_quietly(comm, epochs=2, dtype="float64")
    return {
        "digests": (digest(single.parameters), digest(double.parameters)),
        "identical": single.identical and double.identical,
        "deviations": deviations,
        "float64": double.parameters,
    }


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_train_as_one_process_does(world_size):
    alone = train_quietly(LocalCommunicator(), epochs=2, dtype="float64").parameters
    results = run_ranks(world_size, train_both_ways, backend="shm")
    assert len({result["digests"] for result in results}) == 1
    for result in results:
        assert result["identical"]
        assert len(result["deviations"]) == 2 * 30 * 8  # epochs, steps, parameters
        assert max(result["deviations"]) < 1e-5
        for name, expected in alone.items():
            assert np.abs(result["float64"][name] - expected).max() < 1e-9, name


def train_and_digest(comm):
    return digest(train_quietly(comm, epochs=1).parameters)


def test_training_is_reproducible_bit_for_bit():
    first, second = (run_ranks(2, train_and_digest, backend="shm") for _ in range(2))
    assert first == second


def compare_with_one_sign_changed(comm):
    network = Network(np, "float32", seed=0)
    before = train_digits.same_bits_on_all_ranks(comm, network)
    if comm.rank == 1:
        network.parameters["conv1.bias"][0] = -0.0
    return before, train_digits.same_bits_on_all_ranks(comm, network)


def test_one_bit_of_difference_is_seen_by_all_ranks():
    assert run_ranks(2, compare_with_one_sign_changed, backend="shm") == [(True, False)] * 2


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


def test_two_ranks_reach_97_percent():
    output = run_script("-m", "gradsync", "run", "-n", "2", SCRIPT)
    assert row(output, "ranks") == "2"
    assert row(output, "backend") == "shm, on cpu"
    assert row(output, "buckets") == "3 all-reduces a step"
    assert row(output, "parameters on all ranks") == "identical"
    assert float(row(output, "test accuracy").rstrip("%")) >= 97
    assert output.count("test accuracy") == 7  # every fifth epoch, and the table


def test_script_alone_is_one_process():
    output = run_script(SCRIPT, "--epochs", "1", "--quiet")
    assert row(output, "ranks") == "1"
    assert row(output, "backend") == "local, on cpu"
    assert output.count("test accuracy") == 1


def test_different_parameters_end_in_a_failure(monkeypatch, capsys):
    monkeypatch.setattr(train_digits, "same_bits_on_all_ranks", lambda comm, network: False)
    monkeypatch.setattr(sys, "argv", ["train_digits.py", "--epochs", "1", "--quiet", "--backend", "local"])
    assert train_digits.main() == 1
    assert "DIFFERENT" in capsys.readouterr().out


@pytest.mark.parametrize("value", ["0", "many"])
def test_no_epochs_is_refused(monkeypatch, capsys, value):
    monkeypatch.setattr(sys, "argv", ["train_digits.py", "--epochs", value])
    with pytest.raises(SystemExit):
        train_digits.main()
    assert f"argument --epochs: needs an integer of at least 1, got '{value}'" in capsys.readouterr().err


# -- On a GPU ------------------------------------------------------------------------------------------------

# A first run compiles CuPy's kernels; ranks that share a GPU may take milliseconds for each collective.
GPU_SECONDS = 400


def train_on_gpu(comm):
    result = train_quietly(comm, epochs=2, dtype="float64")
    return result.identical, {name: array.get() for name, array in result.parameters.items()}


@pytest.mark.gpu
@pytest.mark.timeout(GPU_SECONDS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_ranks_on_a_gpu_train_as_one_process_on_the_cpu_does(world_size):
    alone = train_quietly(LocalCommunicator(), epochs=2, dtype="float64").parameters
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
