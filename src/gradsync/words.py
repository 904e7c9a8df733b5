"""What to write instead of a word that gradsync does not have.

The word is one of gradsync 0.2 (REMOVED, which goes in 0.4), or of another library (FOREIGN), or misspelt. A user who
types it gets an error with this advice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import FrameType
from typing import NoReturn

from gradsync.errors import InvalidArgument

_HOOK = "register_hook() takes a function of the bucket; examples/hooks.py has float16, bfloat16, int8 and PowerSGD"
_FEW_LINES = "examples/torch_loop.py and examples/jax_loop.py average gradients in a few lines of your own"
_ADD_UP = "add gradients up in arrays of your own, and hand over each sum once"
_UNEVEN = "with sync.backward(weight=len(batch)): a rank without a batch passes 0 (docs/uneven.md)"
_SIZES = "pass the number of rows of each rank; comm.all_gather(np.array([len(array)])) gives this list"
_REPORT = "the launcher's report shows where each rank is, and print(comm.recorder) the last collectives"
_BENCH = "examples/threshold.py finds a threshold; in a clone of gradsync, `pytest benchmarks/` measures all else"
_DDP = "gs.AllreduceCallback and a hook of each parameter (examples/torch_loop.py)"
_COLLECTIVES = ("all_reduce", "broadcast", "reduce", "all_gather", "gather", "scatter", "reduce_scatter", "all_to_all")
_TRACE = "gradsync run --trace DIR writes a Chrome trace that https://ui.perfetto.dev opens"

#: Where a user types the word -> the word -> what to write instead.
REMOVED: dict[str, dict[str, str]] = {
    "AllreduceCallback": {
        "compression": f"on one machine it made steps slower; {_HOOK}",
        "prescale": "multiply the gradient before you hand it over",
        "postscale": "multiply the result",
        "first_bucket_bytes": "leave it out: no measurement showed a gain",
        "lock_gradients": "leave it out",
    },
    "an AllreduceCallback": {
        "accumulate": _ADD_UP,
        "no_sync": _ADD_UP,
        "discard": "leave it out: hand over nothing that you do not want to reduce",
        "join": _UNEVEN,
        "filled": "sync.results() has all results of the step, also those of gradients that this rank lacked",
        "dump_shapes": "two lines of Python write the shapes: examples/threshold.py shows them",
    },
    "init_process_group": {"debug": "set GRADSYNC_DEBUG=1, or start with `gradsync run --debug`"},
    "all_gather": {"sizes='ask'": _SIZES},
    "gather": {"sizes='ask'": _SIZES},
    "gradsync": {
        "hooks": _HOOK,
        "adapters": _FEW_LINES,
        "Synchronised": _FEW_LINES,
        "trace": _TRACE,
        "dump_flight_recorder": _REPORT,
        "GradientChanged": "leave it out: nothing raises this error",
    },
    "gradsync (command)": {"bench": _BENCH, "trace": _TRACE},
    "gradsync run": {
        "--state-dir": "choose a directory yourself, and pass it to your script",
        "--join-timeout": "init_process_group(timeout_seconds=...) limits the wait for other machines",
        "--node-address": "leave it out: only the address of node 0 matters, and that is in --rendezvous",
        "--dump-dir": _REPORT,
    },
    "gradsync (variables)": {
        "GRADSYNC_STATE_DIR": "choose a directory yourself, and pass it to your script",
        "GRADSYNC_DUMP_DIR": _REPORT,
        "GRADSYNC_START": "unset it",
        "GRADSYNC_RANK": "RANK, which torchrun has too",
        "GRADSYNC_WORLD_SIZE": "WORLD_SIZE, which torchrun has too",
        "GRADSYNC_LOCAL_RANK": "LOCAL_RANK, which torchrun has too",
        "GRADSYNC_LOCAL_WORLD_SIZE": "LOCAL_WORLD_SIZE, which torchrun has too",
        "GRADSYNC_HOSTED": "leave it out: where GRADSYNC_ADDRESS is set, a server is there",
    },
}


#: Likewise for the words of PyTorch, Horovod, mpi4py and their launchers.
FOREIGN: dict[str, dict[str, str]] = {
    "AllreduceCallback": {
        "threshold": "threshold_bytes",
        "bucket_cap_mb": 'threshold_bytes="25 MB"',
        "op": "reduce_method",
        "average": 'reduce_method="mean" or reduce_method="sum"',
        "process_group": "group",
        "max_norm": "clip_norm",
        "find_unused_parameters": 'parameters=... and missing="zero"',
    },
    "init_process_group": {
        "timeout": "collective_timeout_seconds=... for collectives, or timeout_seconds=... for joining the other ranks",
        "init_method": 'address="host:port", or leave it out if a launcher has started the ranks',
        "device_id": 'device="cuda:0"',
    },
    "gradsync": {
        "init": "gs.init_process_group()",
        "get_rank": "gs.get_communicator().rank",
        "rank": "gs.get_communicator().rank",
        "get_world_size": "gs.get_communicator().world_size",
        "size": "gs.get_communicator().world_size",
        **{name: f"gs.get_communicator().{name}(...)" for name in _COLLECTIVES},
        "allreduce": "gs.get_communicator().all_reduce(...)",
        "barrier": "gs.get_communicator().barrier()",
        "reduce_dict": "gs.comm.reduce_dict",
        "DistributedDataParallel": _DDP,
        "DDP": _DDP,
        "DistributedOptimizer": "gs.AllreduceCallback",
        "ZeroRedundancyOptimizer": "examples/sharded_adam.py, on reduce_scatter and all_gather",
        "DistributedSampler": "gs.shard_indices(len(data), epoch)",
        "broadcast_parameters": "gs.bcast_list_(parameters), or gs.broadcast_tree(tree)",
        "clip_grad_norm_": 'gs.AllreduceCallback("mean", clip_norm=1.0)',
        "no_sync": "arrays of your own to add gradients up in, and hand over each sum once",
        "Join": "with sync.backward(weight=len(batch)): a rank without a batch passes 0 (docs/uneven.md)",
        "MPI": "from gradsync.mpi import MPI, or gs.from_mpi(MPI.COMM_WORLD) with mpi4py's",
    },
    "a Communicator": {
        "size": "world_size",
        "get_rank": "rank",
        "get_world_size": "world_size",
        "local_rank": "gs.comm.get_local_rank()",
        "local_world_size": "gs.comm.get_local_size()",
        "reduce_dict": "gs.comm.reduce_dict",
        "all_gather_object": "comm.objects.all_gather, which returns the list",
        "gather_object": "comm.objects.gather, which returns the list",
        "broadcast_object_list": "comm.objects.broadcast",
        "all_gather_into_tensor": "all_gather",
        "reduce_scatter_tensor": "reduce_scatter",
        "all_to_all_single": "all_to_all",
        "isend": "asynchronous.send",
        "Get_rank": "rank",
        "Get_size": "world_size",
        "Allreduce": "all_reduce(array), in place, or all_reduce(array, out=...)",
        "Bcast": "broadcast",
        "bcast": "objects.broadcast, or broadcast for an array",
        "allgather": "objects.all_gather, or all_gather for an array",
        "Allgather": "all_gather",
        "Alltoall": "all_to_all",
        "Reduce_scatter_block": "reduce_scatter",
        "Isend": "asynchronous.send",
        "Irecv": "asynchronous.recv",
        "irecv": "asynchronous.recv",
        "Sendrecv": "exchange",
        "sendrecv": "exchange, or objects.send and objects.recv",
        "Free": "close",
        "Abort": "abort",
        "Split": "split",
        "Create_group": "new_group",
    },
    "a collective": {
        "async_op": "comm.asynchronous, whose collectives return futures",
        "group": "the group in place of comm: group = comm.new_group([0, 2]), then group.all_reduce(array)",
        "src": "root",
        "dst": "root",
        "tensor": "array",
        "tag": "gradsync.mpi, whose messages have tags: gradsync.mpi.wrap(comm).Send(array, dest, tag)",
    },
    "shard_indices": {
        "num_replicas": "no argument for it: the communicator knows",
        "rank": "no argument for it: the communicator knows",
        "drop_last": 'uneven="drop"',
    },
    "gradsync.comm": {
        **{name: f"gs.get_communicator().{name}(...)" for name in _COLLECTIVES if "gather" not in name},
        "all_gather_object": "gs.comm.all_gather",
        "gather_object": "gs.comm.gather",
        "get_local_world_size": "gs.comm.get_local_size()",
    },
    "gradsync (command)": {"launch": "gradsync run", "torchrun": "gradsync run", "start": "gradsync run"},
    "gradsync run": {
        "--timeout": "the variable GRADSYNC_COLLECTIVE_TIMEOUT_SECONDS, which limits how long a collective waits",
        "--np": "-n",
        "--master-addr": "--rendezvous HOST:PORT",
        "--master-port": "--rendezvous HOST:PORT",
        "--rdzv-endpoint": "--rendezvous HOST:PORT",
        "--rdzv-backend": "no option for it: leave it out",
        "--rdzv-id": "no option for it: leave it out",
        "--hosts": "--nnodes, and start one gradsync run on each machine",
        "--hostfile": "--nnodes, and start one gradsync run on each machine",
        "--standalone": "no option for it: without --nnodes all ranks are on this machine",
    },
}


class RemovedName(InvalidArgument, AttributeError):
    """A name that gradsync had until 0.2. As an AttributeError, it lets `hasattr` answer False."""


class RemovedModule(InvalidArgument, ImportError):
    """A module, or a name in an import, of 0.2. As an ImportError, it is skipped by tools that import all modules."""


def _error_for(where: str, word: str) -> str | None:
    """Returns the text of the error for a word that has gone; None if 0.2 had no such word there."""
    advice = REMOVED.get(where, {}).get(word)
    return advice and f"{where.partition(' (')[0]} has no {word} any more (removed in 0.3): {advice}"


def refuse_removed(where: str, word: str) -> None:
    """Raises InvalidArgument if 0.3 has a user's word no more; `where` is a key of REMOVED."""
    if text := _error_for(where, word):
        raise InvalidArgument(text)


def hint(where: str, word: str, known: Iterable[str] = ()) -> str:
    """Returns advice for a word that 0.2 had not either.

    Args:
        where: a key of FOREIGN, or a text that is none.
        word: what a user has typed.
        known: the words that there are.

    Returns:
        Text such as ": use threshold_bytes" for a word of another library; otherwise text such as ": did you mean
        clip_norm?" with the most similar known word; "" if no known word is similar.
    """
    if instead := FOREIGN.get(where, {}).get(word):
        return f": use {instead}"
    from difflib import get_close_matches  # imported here: only errors need it

    close = get_close_matches(word, list(known), n=1, cutoff=0.7)
    return f": did you mean {close[0]}?" if close else ""


def refuse_keywords(who: str, given: Mapping[str, object], known: Iterable[str], where: str = "") -> None:
    """Raises an error for the first keyword argument that a function does not have, if there is one.

    Args:
        who: the function's name.
        given: the unknown arguments, by name.
        known: the names of the function's arguments.
        where: a key of REMOVED and FOREIGN, if that is not the function's name.

    Raises:
        InvalidArgument: 0.2 had the argument.
        TypeError: there is another unknown argument.
    """
    for name in given:
        refuse_removed(where or who, name)
        raise TypeError(f"{who}() got an unexpected keyword argument {name!r}{hint(where or who, name, known)}")


def no_attribute(where: str, owner: str, name: str, known: Iterable[str] = ()) -> NoReturn:
    """Raises the error for an attribute that does not exist, or that has gone.

    Args:
        where: a key of REMOVED or FOREIGN.
        owner: the owner in Python's own words, such as "module 'gradsync'".
        name: the attribute's name.
        known: the names that there are.

    Raises:
        AttributeError: always; a RemovedName if the name has gone.
    """
    if text := _error_for(where, name):
        raise RemovedName(text)
    # Python itself looks for names that begin with "_", and tools look for many.
    advice = "" if name.startswith("_") else hint(where, name, known)
    raise AttributeError(f"{owner} has no attribute {name!r}{advice}")


def is_import_from(frame: FrameType) -> bool:
    """Returns whether a frame is at `from ... import ...`, where Python hides the text of an AttributeError."""
    from dis import opmap  # imported here: only errors need it

    return frame.f_lasti >= 0 and frame.f_code.co_code[frame.f_lasti] == opmap["IMPORT_FROM"]


def no_name(name: str, known: Iterable[str]) -> NoReturn:
    """Raises ImportError for `from gradsync import NAME` with a name that does not exist; RemovedModule if it has gone.

    Args:
        name, known: the name, and those that there are.
    """
    if text := _error_for("gradsync", name):
        raise RemovedModule(text)
    raise ImportError(f"cannot import name {name!r} from 'gradsync'{hint('gradsync', name, known)}", name="gradsync")


def no_module(name: str) -> NoReturn:
    """Raises RemovedModule for an import of a module of gradsync that has gone."""
    raise RemovedModule(_error_for("gradsync", name))
