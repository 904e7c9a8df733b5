"""The public names, the errors, words of other libraries and of 0.2, and numbers of NumPy as arguments."""

from __future__ import annotations

import pickle
import re

import numpy as np
import pytest
from click.testing import CliRunner

import gradsync as gs
from gradsync import errors
from gradsync.cli import main
from gradsync.mpi import MPI
from gradsync.words import REMOVED  # the table that these tests go through

ERRORS = [v for v in vars(errors).values() if isinstance(v, type) and issubclass(v, gs.GradsyncError)]


def test_every_public_name_loads():
    for name in gs.__all__:
        assert getattr(gs, name) is not None
    assert set(gs.__all__) <= set(dir(gs))
    assert "init_process_group" in gs.__all__
    assert not hasattr(gs, "WORLD")  # before there is one


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("AlreduceCallback", "did you mean AllreduceCallback?"),
        ("get_rank", "get_communicator().rank"),
        ("all_reduce", "get_communicator().all_reduce"),
        ("barrier", "get_communicator().barrier()"),
        ("DistributedDataParallel", "AllreduceCallback"),
        ("DistributedSampler", "shard_indices"),
        ("clip_grad_norm_", "clip_norm="),
        ("no_sync", "hand over each sum once"),
        ("DDP", "examples/torch_loop.py"),
    ],
)
def test_a_name_that_gradsync_has_not_says_what_to_use(name, word):
    assert not hasattr(gs, name)
    with pytest.raises(AttributeError) as raised:
        getattr(gs, name)
    assert word in str(raised.value)
    with pytest.raises(ImportError) as raised:
        exec(f"from gradsync import {name}")
    assert word in str(raised.value)


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("Get_rank", "use rank"),
        ("size", "use world_size"),
        ("get_rank", "use rank"),
        ("local_rank", "use gs.comm.get_local_rank()"),
        ("local_world_size", "use gs.comm.get_local_size()"),
        ("all_gather_object", "use comm.objects.all_gather, "),
        ("reduce_dict", "use gs.comm.reduce_dict"),
        ("Allreduce", "use all_reduce"),
        ("irecv", "use asynchronous.recv"),
        ("all_redcue", "did you mean all_reduce?"),
        ("_ipython_display_", "no attribute '_ipython_display_'"),
    ],
)
def test_likewise_an_attribute_of_a_communicator(name, word):
    with gs.init_process_group("local") as comm:
        assert not hasattr(comm, name)
        with pytest.raises(AttributeError, match=re.escape(word)):
            getattr(comm, name)


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda comm, x: comm.broadcast(x, src=0), "use root"),
        (lambda comm, x: comm.reduce(x, dst=0), "use root"),
        (lambda comm, x: comm.gather(x, dst=0), "use root"),
        (lambda comm, x: comm.scatter(x, src=0), "use root"),
        (lambda comm, x: comm.all_reduce(x, async_op=True), "use comm.asynchronous"),
        (lambda comm, x: comm.all_reduce(x, opp="sum"), "did you mean op?"),
        (lambda comm, x: comm.all_reduce(x, "avg"), 'for the average take "mean"'),
        (lambda comm, x: comm.all_reduce(x, "ReduceOp.AVG"), 'for the average take "mean"'),
        (lambda comm, x: comm.all_reduce(x, MPI.SUM), 'such as op="sum"'),
        (lambda comm, x: comm.send(x, 0, tag=3), "use gradsync.mpi, whose messages have tags"),
        (lambda comm, x: comm.recv(x, 0, tag=3), "use gradsync.mpi, whose messages have tags"),
        (lambda comm, x: gs.MPI, "from gradsync.mpi import MPI"),
        (lambda comm, x: gs.shard_indices(8, num_replicas=2), "no argument for it"),
        (lambda comm, x: gs.shard_indices(8, drop_last=True), 'use uneven="drop"'),
        (lambda comm, x: gs.comm.all_reduce(x), "use gs.get_communicator().all_reduce"),
        (lambda comm, x: gs.comm.all_gather_object(x), "use gs.comm.all_gather"),
        (lambda comm, x: gs.AllreduceCallback(backend="gloo"), "in place of gloo, shm"),
    ],
)
def test_likewise_arguments_and_gs_comm(call, word):
    with (
        gs.init_process_group("local") as comm,
        pytest.raises((TypeError, AttributeError, gs.InvalidArgument), match=re.escape(word)),
    ):
        call(comm, np.ones(1))


# -- Errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ERRORS)
def test_errors_pickle_and_are_public(kind):
    error = pickle.loads(pickle.dumps(kind("rank 1/2: what happened")))
    assert (type(error), str(error)) == (kind, "rank 1/2: what happened")
    assert getattr(gs, kind.__name__) is kind


@pytest.mark.parametrize(
    ("kind", "attributes"),
    [
        (
            gs.RankFailed,
            {"rank": 3, "phase": "all_reduce", "exit_code": -9, "traceback_text": "...", "results": {0: 1}},
        ),
        (gs.PlanMismatch, {"descriptions": {0: "a", 1: "b"}, "places": {0: "train.py:4"}}),
        (gs.NonFiniteGradient, {"parameters": ("w", "b")}),
        (gs.MissingGradient, {"descriptions": {0: "a"}}),
    ],
)
def test_attributes_of_errors_survive_pickling(kind, attributes):
    error = pickle.loads(pickle.dumps(kind("text", **attributes)))
    assert {name: getattr(error, name) for name in attributes} == attributes
    with pytest.raises(TypeError, match="exitcode"):
        kind("text", exitcode=1)


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (gs.InvalidArgument, ValueError),
        (gs.UnsupportedDtype, TypeError),
        (gs.BackendUnavailable, RuntimeError),
        (gs.RendezvousTimeout, TimeoutError),
        (gs.RendezvousTimeout, gs.RendezvousError),
        (gs.AuthenticationError, gs.RendezvousError),
        (gs.PlanMismatch, RuntimeError),
        (gs.CollectiveTimeout, TimeoutError),
        (gs.RankFailed, RuntimeError),
        (gs.CommunicatorClosed, RuntimeError),
        (gs.NcclError, RuntimeError),
        (gs.NonFiniteGradient, ArithmeticError),
    ],
)
def test_errors_are_also_the_built_in_that_a_caller_expects(kind, builtin):
    assert issubclass(kind, (gs.GradsyncError, builtin))
    assert issubclass(kind, builtin)


# -- Words of 0.2 ------------------------------------------------------------------------------------------------------


def words(where):
    assert REMOVED[where]
    return sorted(REMOVED[where])


@pytest.mark.parametrize("word", words("AllreduceCallback"))
def test_a_removed_option_of_the_callback_says_what_to_write(word):
    with pytest.raises(gs.InvalidArgument) as raised:
        gs.AllreduceCallback("mean", **{word: None})
    assert REMOVED["AllreduceCallback"][word] in str(raised.value)


@pytest.mark.parametrize("word", words("init_process_group"))
def test_a_removed_argument_of_init_process_group_says_what_to_write(word):
    with pytest.raises(gs.InvalidArgument) as raised:
        gs.init_process_group("local", **{word: None})
    assert REMOVED["init_process_group"][word] in str(raised.value)


@pytest.mark.parametrize(
    ("owner", "where"),
    [(gs.AllreduceCallback("mean"), "an AllreduceCallback"), (gs, "gradsync")],
    ids=["callback", "gs"],
)
def test_removed_attributes_say_what_to_write(owner, where):
    for word in words(where):
        with pytest.raises(gs.InvalidArgument) as raised:
            getattr(owner, word)
        assert REMOVED[where][word] in str(raised.value)
        assert not hasattr(owner, word)
        if owner is gs:
            with pytest.raises(gs.InvalidArgument) as raised:
                exec(f"from gradsync import {word}")
            assert REMOVED[where][word] in str(raised.value)
    with pytest.raises(AttributeError, match="no attribute 'never'") as raised:
        getattr(owner, "never")  # noqa: B009
    assert not isinstance(raised.value, gs.InvalidArgument)


@pytest.mark.parametrize(
    ("where", "arguments"),
    [("gradsync run", lambda word: ["run", word, "x", "train.py"]), ("gradsync (command)", lambda word: [word, "x"])],
)
def test_removed_options_and_commands_say_what_to_write(where, arguments):
    for word in words(where):
        done = CliRunner().invoke(main, arguments(word))
        assert done.exit_code == 2
        assert REMOVED[where][word] in done.output


def test_removed_variables_say_what_to_write(monkeypatch):
    for name in words("gradsync (variables)"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "1")
            with pytest.raises(gs.InvalidArgument) as raised:
                gs.init_process_group("local")
        assert name in str(raised.value)
        assert str(raised.value).endswith(REMOVED["gradsync (variables)"][name])
        with monkeypatch.context() as patch:
            patch.setenv(name, "")  # as good as not set
            gs.init_process_group("local")
            gs.destroy_process_group()


@pytest.mark.parametrize("statement", ["from gradsync.hooks import Int8Hook", "import gradsync.adapters.torch"])
def test_a_removed_module_says_what_to_write(statement):
    with pytest.raises(gs.InvalidArgument) as raised:
        exec(statement)
    assert isinstance(raised.value, ImportError)  # for tools that import every module


# -- Numbers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("no_integer", [True, np.True_, 2.0, np.float64(2), "2", np.array([2, 2])])
def test_what_is_no_integer_is_refused(no_integer):
    calls = [
        lambda: gs.launch(print, (), no_integer),
        lambda: gs.spawn(print, nprocs=no_integer),
        lambda: gs.launcher(print, no_integer),
        lambda: gs.launcher(print, port=no_integer),
        lambda: gs.init_process_group("local", rank=0, world_size=no_integer),
        lambda: gs.AllreduceCallback(threshold_bytes=no_integer),
        lambda: gs.comm.create_local_process_group(no_integer),
        lambda: gs.shard_indices(no_integer, epoch=0, seed=0),
        lambda: gs.get_offsets([(no_integer,)]),
    ]
    for call in calls:
        with pytest.raises(gs.InvalidArgument):
            call()


@pytest.mark.ranks(2, on=("shm", "fake"))
def test_integers_of_numpy_are_integers(comm):
    from arrays import arrays_of

    rank, n, last, xp = comm.rank, comm.world_size, np.uint8(comm.world_size - 1), arrays_of(comm).xp
    assert comm.objects.broadcast(rank, last) == n - 1
    assert comm.objects.scatter(list(range(n)), last) == rank
    array = xp.full(4, rank, np.float32)
    comm.broadcast(array, last)
    assert (array == n - 1).all()
    comm.reduce(array, "sum", last)
    gs.bcast_list_([array], root=last)
    comm.exchange(array, dest=np.uint8((rank + 1) % n), out=xp.empty(4, np.float32), source=np.uint8((rank - 1) % n))
    with comm.split(np.int64(0), np.int16(-rank)) as half:
        assert half.rank == n - 1 - rank
    sync = gs.AllreduceCallback("sum", threshold_bytes=np.int64(64))
    assert type(sync.threshold_bytes) is int
    assert gs.get_offsets([None, (2,), (), (np.int64(1), 2)]) == [0, 1, 1, 3, 3, 4, 4, 6]  # None: one element
