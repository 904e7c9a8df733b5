"""The examples do what they say. (Those that a page shows: test_pages.py.)"""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import random
import re
import runpy
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

import gradsync as gs

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


@pytest.fixture
def run(cli):
    """run(ranks, script, ...) gives what rank 0 prints; nothing else may be printed."""

    def run(ranks, name, *words):
        done = cli("run", "-n", ranks, "--backend", "shm", EXAMPLES / name, *words)
        assert (done.code, re.sub(r"gradsync: \d+ ranks share \d+ cores?, .*\n", "", done.err)) == (0, "")
        return done.out.replace("[rank 0] ", "")

    return run


def test_every_example_is_in_the_table():
    tracked = {
        str(path.relative_to(EXAMPLES)) for path in EXAMPLES.rglob("*.*") if path.suffix in (".py", ".sh", ".yaml")
    }
    shown = set(re.findall(r"\]\(([\w/.]+)\)", (EXAMPLES / "README.md").read_text()))
    assert tracked - shown == set()
    assert [link for link in shown if not (EXAMPLES / link).exists()] == []


# -- Training on several ranks is the training of one process -------------------------------------------------------


def in_one_process(batches, rate=0.1):
    """Plain gradient descent on (x, y) batches, each of all ranks at once; the weights after each step."""
    model, history = np.zeros(4), []
    for x in batches:
        model = model - rate * 2 * (x @ model - x @ [1.0, 2.0, 3.0, 4.0]) @ x / len(x)
        history.append(model)
    return history


@pytest.fixture
def orders():
    """The order of the samples in three epochs, as one process draws it."""
    return [gs.shard_indices(121, epoch) for epoch in range(3)]


def uneven_batches(ranks, orders):
    x = np.hstack([np.random.default_rng(0).normal(size=(121, 3)), np.ones((121, 1))])
    for order in orders:
        for begin in range(0, -(-121 // ranks), 4):
            yield x[np.concatenate([order[rank::ranks][begin : begin + 4] for rank in range(ranks)])]


@pytest.mark.ranks(2, 3)
def test_uneven_batches_make_the_steps_of_one_process(comm, orders):
    """Of three ranks two have no batch in the last step of an epoch."""
    history = runpy.run_path(str(EXAMPLES / "uneven_batches.py"))["train"](3)
    np.testing.assert_allclose(history, in_one_process(uneven_batches(comm.world_size, orders)), rtol=1e-12)


@pytest.mark.ranks(2, 3, fresh=True)
def test_sharded_adam_has_the_bits_of_adam_on_every_rank(comm, tmp_path):
    """And one rank alone goes on from what several have saved."""
    sys.path[:0] = [str(EXAMPLES)]
    from sharded_adam import Adam, ShardedAdam, batches, forward, make_parameters, train

    whole = Adam(make_parameters(np.random.default_rng(0)), 1e-3)
    sync = gs.AllreduceCallback("mean", comm)
    for _, batch in zip(range(7), batches(np.random.default_rng(comm.rank)), strict=False):
        _, backward = forward(whole.parameters, batch)
        with sync.backward():
            for name, gradient in backward():
                sync(name, gradient)
        whole.step(sync.results())

    sharded = ShardedAdam(comm, make_parameters(np.random.default_rng(0)), 1e-3)
    train(comm, sharded, 7)
    sharded.save(tmp_path / "state.npz")
    comm.barrier()
    with comm.split(comm.rank) as alone:
        resumed = ShardedAdam(alone, make_parameters(np.random.default_rng(1)), 1e-3)
        resumed.load(tmp_path / "state.npz")
        kept = {kind: resumed.by_name(part) for kind, part in resumed.parts().items()}
    assert resumed.adam.steps == 7
    for name, value in whole.parameters.items():
        assert sharded.parameters[name].tobytes() == value.tobytes(), name
        assert kept["parameters"][name].tobytes() == value.tobytes(), name
        assert [kept[kind][name].tobytes() for kind in ("first", "second")] == [
            m.tobytes() for m in whole.moments[name]
        ]


@pytest.fixture
def digits(tmp_path):
    """A folder with a small sklearn.datasets: its digits without its import, which takes longer than an epoch."""
    (found,) = importlib.util.find_spec("sklearn").submodule_search_locations
    with gzip.open(Path(found, "datasets", "data", "digits.csv.gz"), "rt") as file:
        np.save(tmp_path / "digits.npy", np.loadtxt(file, delimiter=","))
    (tmp_path / "sklearn").mkdir()
    (tmp_path / "sklearn" / "__init__.py").touch()
    (tmp_path / "sklearn" / "datasets.py").write_text(
        "import types, numpy as np\n"
        "def load_digits():\n"
        f"    table = np.load({str(tmp_path / 'digits.npy')!r})\n"
        "    images, target = table[:, :-1].reshape(-1, 8, 8), table[:, -1].astype(int)\n"
        "    return types.SimpleNamespace(images=images, target=target)\n"
    )
    return tmp_path


@pytest.mark.ranks(2, fresh=True)
def test_ranks_train_on_digits_as_one_process_does(comm, digits):
    threadpoolctl = pytest.importorskip("threadpoolctl")
    sys.path[:0] = [str(digits), str(EXAMPLES)]
    from train_digits import Settings, train

    deviations = []

    def compare(network, batch, reduced):
        for name, whole in network.backward(network.forward(batch[0]), batch[1]):
            deviations.append(np.abs(reduced[name] - whole).max() / np.abs(whole).max())

    with threadpoolctl.threadpool_limits(1):  # one BLAS thread has one order of summation
        train(comm, Settings(quiet=True, epochs=1), compare)
        double = train(comm, Settings(quiet=True, epochs=1, dtype="float64"), None)
        with comm.split(comm.rank) as alone:
            whole = train(alone, Settings(quiet=True, epochs=1, dtype="float64"), None)
    assert len(deviations) == 30 * 8  # steps, parameters
    assert max(deviations) < 1e-5
    for name, expected in whole.parameters.items():
        assert np.abs(double.parameters[name] - expected).max() < 1e-9, name


def row(table, label):
    (value,) = re.findall(rf"^(?:\[rank 0\] )?{label}  +(.*)$", table, re.MULTILINE)
    return value


@pytest.mark.parametrize(("ranks", "epochs"), [(2, 15), (1, 1)])
def test_the_demo(cli, digits, ranks, epochs):
    environment = {"PYTHONPATH": str(digits), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "NO_COLOR": "1"}
    done = cli("run", "-n", ranks, EXAMPLES / "train_digits.py", "--epochs", epochs, environment=environment)
    assert done.code == 0, done.err
    assert row(done.out, "ranks") == str(ranks)
    assert row(done.out, "backend") == ("shm, on cpu" if ranks == 2 else "local, on cpu")
    assert row(done.out, "parameters").endswith("identical on all ranks")
    if epochs == 15:
        assert float(row(done.out, "test accuracy").rstrip("%")) >= 97


# -- What they print ---------------------------------------------------------------------------------------------------


def test_collectives(run):
    ranks = 3
    numbers = range(ranks)
    wanted = {
        "all_reduce": [[ranks - 1] * 2] * ranks,
        "all_gather": [[rank] * 2 for rank in numbers for _ in numbers],
        "uneven": [rank for rank in numbers for _ in range(rank + 1)],
        "reduce_scatter": [[sum(numbers)] * 2],
        "all_to_all": [[rank] * 2 for rank in numbers],
        "exchange": [[ranks - 1] * 2] * ranks,
        "asynchronous": [float(ranks)] * 3,
        "group": list(numbers[::2]),
        "objects": list(numbers),
    }
    lines = [line.split(maxsplit=1) for line in run(ranks, "collectives.py").splitlines()]
    assert {name: json.loads(values) for name, values in lines} == wanted


def test_mixed_precision_skips_the_same_steps_on_all_ranks(run):
    assert run(2, "loss_scaling.py").endswith("weights [1. 2. 3.], 7 of 200 steps skipped\n")


def test_uneven_batches_end_with_one_model(run):
    shown = "samples by rank [41, 40, 40], 110 steps: weights [1. 2. 3.], bias [4.]\n"
    assert run(3, "uneven_batches.py") == shown


def losses_in(shown):
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", shown)]


@pytest.mark.parametrize("words", [("transformer.py", "--steps", 25), ("sharded_adam.py",)])
def test_the_transformer_learns_to_write(run, words):
    losses = losses_in(run(2, *words))
    assert losses[0] > 4.4  # a guess among 96 letters
    assert losses[-1] < 3.0


def test_each_hook_trains_as_the_plain_mean_does(run):
    distances = dict(re.findall(r"(\w+): weights ([\d.]+)% from those of the plain mean", run(2, "hooks.py")))
    assert list(distances) == ["float16", "bfloat16", "Int8", "PowerSGD"]
    assert all(float(percent) < 0.1 for percent in distances.values())


def test_a_resumed_training_ends_with_the_bits_of_an_uninterrupted_one(cli, tmp_path):
    def train(folder, *words):
        done = cli("run", "-n", 2, "--max-restarts", 2, EXAMPLES / "resume_after_failure.py", folder, *words)
        assert done.code == 0, done.err
        with np.load(folder / "checkpoint.npz") as saved:
            return done, {name: array.tobytes() for name, array in saved.items()}

    whole, expected = train(tmp_path / "whole")
    resumed, found = train(tmp_path / "resumed", "--fail-in-epoch", 3)
    assert "was killed by SIGKILL" in resumed.err
    assert resumed.err.count("starting all ranks again") == 1
    assert resumed.out == whole.out  # every epoch once: those before the failure are not trained again
    assert found == expected


def test_a_training_survives_a_rank_and_takes_in_a_new_one(cli, digits):
    """It ends as the one of one process does, to which nothing happens."""
    options = {"environment": {"PYTHONPATH": str(digits), "OMP_NUM_THREADS": "1"}}
    script, after = EXAMPLES / "survive.py", random.randint(1, 900)
    done = cli("run", "-n", 4, "--min-ranks", 3, "--respawn", 1, script, "--kill", after, **options)
    assert done.code == 0, done.err
    assert "was killed by SIGKILL; starting it again" in done.err
    worlds = re.findall(r"step (\d+): (\d) ranks", done.out)
    # On a busy machine the new rank may have come before the others went on: they are four again at once.
    assert worlds in ([("0", "4")], [("0", "4"), (str(after), "3"), (worlds[-1][0], "4")]), done.out + done.err
    alone = cli.python(script, **options)
    ours, theirs = (float(re.search(r"accuracy ([\d.]+)%", each.out)[1]) for each in (done, alone))
    assert ours == pytest.approx(theirs, abs=1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_a_training_survives_all_that_is_killed(cli, digits, seed):
    """Ranks and their guards, as they start, join, train, rebuild; only rank 3 is left alone."""
    dice, options = random.Random(seed), {"environment": {"PYTHONPATH": str(digits), "OMP_NUM_THREADS": "1"}}
    words = ["run", "-n", 4, "--min-ranks", 1, "--respawn", 1000, EXAMPLES / "survive.py"]
    launcher = cli.start(*words, **options)
    launcher.read_until("step 0: 4 ranks")
    end = time.monotonic() + 2.5
    while time.monotonic() < end:
        time.sleep(dice.uniform(0, dice.choice([0.05, 0.5])))
        found = [pid for pid in cli.processes() if is_of_rank(pid, "012")]
        for pid in dice.sample(found, min(len(found), dice.randint(1, 3))):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    code, out, err = launcher.result()
    assert code == 0, err
    assert float(re.search(r"accuracy ([\d.]+)%", out)[1]) > 96.5


def is_of_rank(pid, ranks):
    with suppress(OSError):
        return bool(re.search(rf"(^|\0)RANK=[{ranks}]\0", Path(f"/proc/{pid}/environ").read_text()))
    return False


def test_thresholds_of_own_gradients_end_with_advice(run, tmp_path):
    gradients = {"w": np.zeros((300, 3), np.float32), "b": np.zeros((), np.float16), "v": np.zeros(7)}
    shapes = {name: [str(g.dtype), g.shape] for name, g in gradients.items()}
    (tmp_path / "shapes.json").write_text(json.dumps(shapes))
    lines = run(2, "threshold.py", tmp_path / "shapes.json").splitlines()
    assert [line.split(" MB")[0].strip() for line in lines[:-1]] == ["0.5", "1", "2.5", "5", "10", "25", "50"]
    assert "ms are noise." in lines[-1]


EIGHT_ROUNDS = [0.9, 0.99, 0.99, 1.0, 1.0, 1.01, 1.01, 1.1]  # the quartiles are 0.99 and 1.01


@pytest.mark.parametrize(
    ("milliseconds", "words"),
    [
        ({1: 100, 10: 102, 50: 102.9}, ("Keep the default", "nothing to choose", "below 3 ms are noise")),
        ({1: 100, 10: 103.5, 50: 140}, ('Take threshold_bytes="1 MB"', "default of 10 MB is slower")),
        ({1: 102, 2.5: 100, 10: 120}, ('Take threshold_bytes="1 MB"', "are noise")),  # the smallest of those alike
        ({2.5: 100, 5: 120, 10: 120}, ('Take threshold_bytes="2.5 MB"', "are noise")),
        ({1: 100, 10: 102, 50: 140}, ("The default of 10 MB is right", "below 3 ms")),
        ({1: 120, 10: 100, 50: 140}, ("The default of 10 MB is right", "below 3 ms")),
    ],
)
def test_advice_on_thresholds(milliseconds, words):
    advice = runpy.run_path(str(EXAMPLES / "threshold.py"))["advice"]
    sentence = advice({mb: [each * share / 1e3 for share in EIGHT_ROUNDS] for mb, each in milliseconds.items()})
    assert [word for word in words if word not in sentence] == []
    noisy = advice({mb: [each * (0.5 + n) / 4e3 for n in range(8)] for mb, each in milliseconds.items()})
    assert "nothing to choose" in noisy  # the quartiles are further apart than the thresholds
    assert "more than 7 rounds" in advice({mb: [each] * 7 for mb, each in milliseconds.items()})


@pytest.mark.parametrize(
    ("ranks", "name", "line"),
    [
        (2, "tutorial/many_ranks.py", "step 100: weights [1. 2. 3.], bias [4.]"),
        (2, "failures/drifts.py", "  rank 1: float64[10] with digest 88cc092b5290846a"),
    ],
)
def test_small_ones(run, ranks, name, line):
    assert line in run(ranks, name).splitlines()


@pytest.mark.parametrize(
    ("name", "environment", "code", "word"),
    [
        ("raises.py", {}, 1, "failed with exit code 1"),
        ("disagrees.py", {}, 0, "'dense' is missing here on rank 1"),  # it catches the error and prints it
        ("dies.py", {}, 137, "was killed by SIGKILL"),
        ("stalls.py", {"GRADSYNC_COLLECTIVE_TIMEOUT_SECONDS": "3"}, 1, "CollectiveTimeout"),
    ],
)
def test_failures_are_reported(cli, name, environment, code, word):
    done = cli("run", "-n", 2 + (name == "dies.py"), EXAMPLES / "failures" / name, environment=environment)
    assert (done.code, word in done.err + done.out) == (code, True), done


def test_a_trace_tells_who_was_waited_for(cli, tmp_path):
    done = cli("run", "-n", 2, "--no-prefix", "--trace", tmp_path / "traced", EXAMPLES / "failures" / "straggles.py")
    assert (done.code, len(done.err.splitlines())) == (0, 4)
    assert "most waited for: rank 1" in done.err


# -- Loops of other libraries ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("library", "name"), [("torch", "torch_loop.py"), ("jax", "jax_loop.py")])
@pytest.mark.slow
def test_loops_of_other_libraries_learn(run, library, name):
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"no {library}: pip install {library}")
    losses = losses_in(run(2, name))
    assert losses[0] > 0.6
    assert losses[-1] < 0.35


@pytest.mark.slow
def test_a_torch_model_and_its_optimiser_survive_a_rank(cli):
    if importlib.util.find_spec("torch") is None:
        pytest.skip("no torch: pip install torch")
    launcher = cli.start(
        "run", "-n", 3, "--respawn", 1, EXAMPLES / "torch_survive.py", environment={"OMP_NUM_THREADS": "1"}
    )
    launcher.read_until("step 0: 3 ranks")
    time.sleep(random.uniform(0, 0.5))
    for pid in cli.processes():
        if is_of_rank(pid, "1"):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    code, out, err = launcher.result()
    assert code == 0, err
    assert len(re.findall(r"step \d+: 3 ranks", out)) == 2, err  # with the new rank, at the end
    assert float(re.search(r"loss ([\d.]+)", out)[1]) < 0.3


@pytest.mark.slow
@pytest.mark.ranks(3, fresh=True)
def test_a_torch_model_is_that_of_one_process_where_ranks_lack_gradients(comm):
    """Each rank uses another layer; then rank 1 has no batch; then no rank uses some. One layer is frozen."""
    torch = pytest.importorskip("torch")
    sys.path[:0] = [str(EXAMPLES)]
    from torch_loop import copy_results, synchronise

    torch.set_num_threads(1)
    samples = torch.randn(20, comm.world_size, 4, 3, generator=torch.Generator().manual_seed(7)).double()

    def make(seed):
        torch.manual_seed(seed)
        model = torch.nn.ModuleDict({name: torch.nn.Linear(3, 3) for name in ("all", "even", "odd", "frozen")}).double()
        model["frozen"].requires_grad_(False)
        return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=0.1)

    def loss_of(model, batch, layers):
        return sum(model[name](model["frozen"](batch)).square().mean() for name in layers)

    others = [("all", "odd" if rank % 2 else "even") for rank in range(comm.world_size)]
    without_1 = [() if rank == 1 else ("all", "even", "odd") for rank in range(comm.world_size)]
    rarely_odd = [
        [("all", "odd") if rank == step % 5 else ("all",) for rank in range(comm.world_size)] for step in range(20)
    ]
    for missing, find_unused, layers_in in (
        ("zero", False, [others] * 20),
        ("error", False, [without_1] * 20),
        ("zero", True, rarely_odd),  # and never "even"
    ):
        model, optimizer = make(comm.rank)
        sync = synchronise(model, missing=missing)
        alone, optimizer_alone = make(0)
        for batches, layers_of in zip(samples, layers_in, strict=True):
            layers = layers_of[comm.rank]
            optimizer.zero_grad()
            with sync.backward(weight=int(layers != ())):
                if layers:
                    loss_of(model, batches[comm.rank], layers).backward()
            copy_results(model, sync, find_unused=find_unused)
            optimizer.step()
            optimizer_alone.zero_grad()
            losses = [loss_of(alone, *of_rank) for of_rank in zip(batches, layers_of, strict=True) if of_rank[1]]
            (sum(losses) / len(losses)).backward()
            optimizer_alone.step()
        gs.check_consistency({name: value.numpy() for name, value in model.state_dict().items()})
        for name, value in alone.state_dict().items():
            torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-12, atol=1e-14)
