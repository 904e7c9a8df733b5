"""mpi4py's shape over any gradsync communicator: `from gradsync.mpi import MPI` in place of `from mpi4py import MPI`.

A program for mpi4py then runs under `gradsync run` on a laptop, over NCCL on GPUs, and over MPI; neither MPI nor mpi4py
is needed. Names, arguments and results are mpi4py's, errors are gradsync's.

Buffers are arrays (NumPy, CuPy, any with DLPack), other objects with a buffer, or lists: [array, type],
[array, count], [array, count, type], [array, (count, displacement), type], and for the calls that end in v
[array, counts], [array, (counts, displacements)] and the same with a type. A type is MPI.DOUBLE or the like; it has to
fit the array. Arrays need to be contiguous.

docs/mpi4py.md has what differs from MPI.
"""

from __future__ import annotations

import operator
import os
import pickle
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from itertools import accumulate
from typing import Any, Literal, NamedTuple, NoReturn

import numpy as np

from gradsync import __version__
from gradsync.arguments import integer_of
from gradsync.communicators.communicator import Communicator
from gradsync.communicators.groups import NonMember
from gradsync.communicators.local import local_communicator
from gradsync.communicators.tagged import ANY_TAG, OBJECT, Header, Receiving, Sending
from gradsync.communicators.world import group_or_world
from gradsync.errors import GradsyncError, InvalidArgument, UnsupportedDtype
from gradsync.futures import DONE, CollectiveFuture
from gradsync.process_group import destroy_process_group, get_communicator, init_process_group, is_initialized
from gradsync.reduction import ReduceOp

PROC_NULL, ANY_SOURCE, UNDEFINED = -1, -2, -32766
IDENT, CONGRUENT, SIMILAR, UNEQUAL = range(4)
_LARGEST_TAG = 2**31 - 1

# What is not there: the beginnings of names -> what to use.
_ROWS = {
    "Win": "Send and Recv; windows need MPI",
    "File": "a file for each rank, or MPI.File of mpi4py",
    "Create_cart": "Split, and neighbours computed from Get_rank(); at an open end PROC_NULL",
    "Create_graph Create_dist_graph": "Split, and neighbours computed from Get_rank()",
    "Get_topology Cart_map Graph_map topology is_topo": "Split, and neighbours computed from Get_rank()",
    "Compute_dims": "a shape of your own, such as [size // n, n]",
    "Create_intercomm": "one communicator of all ranks, and Split",
    "Spawn": "more ranks from the start: gradsync run -n",
    "Connect Accept": "one job with all ranks",
    "Probe Iprobe Mprobe Improbe probe iprobe mprobe improbe": (
        "recv(), which takes an object of any size, or a Recv into a buffer that is large enough"
    ),
    "Scan Exscan scan exscan": "allgather, and add up what the lower ranks have",
    "Bsend Ibsend": "Isend, and Wait when the buffer is needed again",
    "Rsend": "Send",
    "Irsend": "Isend",
    "Isendrecv": "Irecv and Isend, and Waitall",
    "Isendrecv_replace": "Irecv and Isend of a copy, and Waitall",
    "Send_init": "Isend in each round",
    "Recv_init": "Irecv in each round",
    "Cancel": "a message that the receiver can tell from the others by its tag",
    "Alltoallw": "Alltoallv",
    "Waitsome": "Waitany",
    "Testsome": "Testany",
    "Set_errhandler Get_errhandler ERRORS_RETURN ERRORS_ARE_FATAL": (
        "try and except: errors are always raised, so leave it out"
    ),
    "Call_errhandler": "raise",
    "Set_name": "a name of your own: that of a communicator stays",
    "Set_attr Get_attr Create_keyval Delete_attr": "a dict of your own",
    "Info INFO_NULL Get_info": "the call without it",
    "Translate_ranks": "allgather(MPI.COMM_WORLD.Get_rank()) on the smaller communicator",
    "Range_incl": "Incl(range(...))",
    "Range_excl": "Excl(range(...))",
    "Union Intersection Difference Intersect": "Incl of a group, with the ranks listed",
    "Create_vector Create_contiguous Create_hvector Create_indexed Create_indexed_block Create_hindexed Create_struct "
    "Create_subarray Create_resized": "a contiguous copy of the array: np.ascontiguousarray(part)",
    "Commit": "the array as it is: types need no Commit",
    "Pack": "pickle, or np.concatenate of views as np.uint8",
    "Unpack": "pickle, or views of one np.uint8 array",
    "PACKED WCHAR": "MPI.BYTE, and array.view(np.uint8)",
    "Alloc_mem": "np.empty",
    "DOUBLE_INT FLOAT_INT LONG_INT SHORT_INT INT_INT TWOINT": (
        "allreduce of the pair (value, place) with MPI.MAXLOC or MINLOC"
    ),
    "LONG_DOUBLE REAL16": "MPI.DOUBLE, and arrays of float64",
    "C_LONG_DOUBLE_COMPLEX COMPLEX32": "MPI.C_DOUBLE_COMPLEX, and arrays of complex128",
    "Get_version get_vendor": "MPI.Get_library_version()",
    "Init_thread": "Init",
    "Idup": "Dup",
    "Disconnect": "Free",
    **{
        f"I{name}": f"{name.capitalize()}, or comm.communicator.asynchronous.{ours}"
        for name, ours in {
            **{"bcast": "broadcast", "barrier": "barrier", "reduce": "reduce", "reduce_scatter": "reduce_scatter"},
            **{"reduce_scatter_block": "reduce_scatter", "gather": "gather", "scatter": "scatter"},
            **{"allgather": "all_gather", "alltoall": "all_to_all"},
        }.items()
    },
}
_INSTEAD = {name: advice for names, advice in _ROWS.items() for name in names.split()}


def _missing(owner: str, name: str) -> NoReturn:
    advice = _INSTEAD.get(name) or _INSTEAD.get(name.rstrip("vw"))
    if advice is None and name.endswith("_init"):
        advice = f"{name.removesuffix('_init')} in each round"
    if advice is None and owner == "Comm" and hasattr(Communicator, name):
        advice = f"comm.communicator.{name}"
    text = (
        f": use {advice}"
        if advice
        else "; for what only MPI has keep mpi4py, and hand the gradients to gs.from_mpi(comm)"
    )
    raise AttributeError(f"gradsync.mpi has no {owner}.{name}{text}", name=name)


class _ShapedType(type):
    def __getattr__(cls, name: str) -> NoReturn:  # e.g. for MPI.Request.Waitsome
        _missing(cls.__name__, name)


class _Shaped(metaclass=_ShapedType):
    """A class in place of one of mpi4py's, which says what to use for what it lacks."""

    def __getattr__(self, name: str) -> NoReturn:
        _missing(type(self).__name__, name)


# -- Types and operators ----------------------------------------------------------------------------------------------


class Datatype(_Shaped):
    """The type of the elements of a buffer, e.g. MPI.DOUBLE: a name for a dtype of NumPy."""

    def __init__(self, name: str, dtype: Any) -> None:
        self.name = name
        self.dtype = np.dtype(dtype)

    def Get_size(self) -> int:
        """Returns the size of one element in bytes."""
        return int(self.dtype.itemsize)

    def Get_extent(self) -> tuple[int, int]:
        """Returns the lower bound, which is 0, and the size of one element in bytes."""
        return 0, self.Get_size()

    size = extent = property(Get_size)

    def Get_name(self) -> str:
        """Returns the name in MPI."""
        return f"MPI_{self.name}"

    def __repr__(self) -> str:
        return f"<MPI.{self.name} ({self.dtype})>"


_DTYPES = {
    **{"CHAR": "S1", "SIGNED_CHAR": "i1", "UNSIGNED_CHAR": "u1", "BYTE": "u1", "C_BOOL": "?", "BOOL": "?"},
    **{"SHORT": "h", "INT": "i", "LONG": "l", "LONG_LONG": "q", "FLOAT": "f4", "DOUBLE": "f8"},
    **{"UNSIGNED_SHORT": "H", "UNSIGNED": "I", "UNSIGNED_INT": "I", "UNSIGNED_LONG": "L", "UNSIGNED_LONG_LONG": "Q"},
    **{f"INT{bits}_T": f"i{bits // 8}" for bits in (8, 16, 32, 64)},
    **{f"UINT{bits}_T": f"u{bits // 8}" for bits in (8, 16, 32, 64)},
    **{"C_FLOAT_COMPLEX": "c8", "C_DOUBLE_COMPLEX": "c16", "COMPLEX": "c8", "DOUBLE_COMPLEX": "c16"},
    **{"CXX_BOOL": "?", "C_COMPLEX": "c8", "CXX_FLOAT_COMPLEX": "c8", "CXX_DOUBLE_COMPLEX": "c16"},
    **{"REAL": "f4", "REAL4": "f4", "REAL8": "f8", "DOUBLE_PRECISION": "f8", "INTEGER": "i4", "AINT": "i8"},
    **{f"INTEGER{size}": f"i{size}" for size in (1, 2, 4, 8)},
    **{"COMPLEX8": "c8", "COMPLEX16": "c16", "LOGICAL": "i4", "CHARACTER": "S1", "COUNT": "i8", "OFFSET": "i8"},
    **{"SIGNED_SHORT": "h", "SIGNED_INT": "i", "SIGNED_LONG": "l", "SIGNED_LONG_LONG": "q"},
    **{"F_INT": "i4", "F_FLOAT": "f4", "F_DOUBLE": "f8", "F_COMPLEX": "c8", "F_DOUBLE_COMPLEX": "c16", "F_BOOL": "i4"},
}
_TYPES = {name: Datatype(name, dtype) for name, dtype in _DTYPES.items()}
_RAW = ("|u1", "|i1", "|S1", "|V1")  # the bytes of any type


class Op(_Shaped):
    """An operator. SUM, PROD, MIN and MAX reduce arrays and objects, the others objects only."""

    def __init__(self, name: str, function: Callable[[Any, Any], Any], of_arrays: ReduceOp | None = None) -> None:
        self.name = name
        self._function = function
        self.of_arrays = of_arrays

    def __call__(self, x: Any, y: Any) -> Any:
        return self._function(x, y)

    def __repr__(self) -> str:
        return f"<MPI.{self.name}>"

    @staticmethod
    def Create(*_: Any, **__: Any) -> NoReturn:
        """Raises: there are no operators of the user."""
        raise InvalidArgument("gradsync.mpi has no operators of the user: use allgather, and reduce in the program")


def _extreme(first_wins: Callable[[Any, Any], bool]) -> Callable[[Any, Any], Any]:
    """MAXLOC and MINLOC: the values are pairs (value, place); of equal values the lower place wins."""

    def choose(x: Any, y: Any) -> Any:
        if x[0] == y[0]:
            return x[0], min(x[1], y[1])
        return x if first_wins(x[0], y[0]) else y

    return choose


_OPS = {
    "SUM": Op("SUM", operator.add, ReduceOp.SUM),
    "PROD": Op("PROD", operator.mul, ReduceOp.PROD),
    "MIN": Op("MIN", lambda x, y: y if y < x else x, ReduceOp.MIN),
    "MAX": Op("MAX", lambda x, y: y if y > x else x, ReduceOp.MAX),
    "LAND": Op("LAND", lambda x, y: bool(x) and bool(y)),
    "LOR": Op("LOR", lambda x, y: bool(x) or bool(y)),
    "LXOR": Op("LXOR", lambda x, y: bool(x) is not bool(y)),
    "BAND": Op("BAND", operator.and_),
    "BOR": Op("BOR", operator.or_),
    "BXOR": Op("BXOR", operator.xor),
    "MAXLOC": Op("MAXLOC", _extreme(operator.gt)),
    "MINLOC": Op("MINLOC", _extreme(operator.lt)),
}
SUM = _OPS["SUM"]


class _InPlace:
    def __repr__(self) -> str:
        return "<MPI.IN_PLACE>"


IN_PLACE = _InPlace()


def _is_in_place(buffer: Any) -> bool:
    return buffer is None or buffer is IN_PLACE  # as in mpi4py


# -- Requests ---------------------------------------------------------------------------------------------------------


class Status(_Shaped):
    """What a receive tells: the source, the tag and the size of the message."""

    def __init__(self) -> None:
        self.source, self.tag, self.count, self.error = ANY_SOURCE, ANY_TAG, 0, 0

    def Get_source(self) -> int:
        return self.source

    def Get_tag(self) -> int:
        return self.tag

    def Get_error(self) -> int:
        return self.error

    def Get_count(self, datatype: Datatype = _TYPES["BYTE"]) -> int:
        """Returns the number of elements of that type; UNDEFINED if the message does not have whole ones."""
        count, rest = divmod(self.count, datatype.dtype.itemsize)
        return UNDEFINED if rest else count

    Get_elements = Get_count

    def Is_cancelled(self) -> bool:
        return False

    def _set(self, source: int | None, header: Header | None) -> None:
        self.source = ANY_SOURCE if source is None else source
        self.tag, self.count = (ANY_TAG, 0) if header is None else (header.tag, header.size)
        self.error = 0


class Request(_Shaped):
    """A message or a collective that was begun. Messages move on while this rank waits or tests.

    Args:
        begun: what was begun; None: a request that is over, such as MPI.REQUEST_NULL.
        source: the rank of the message, PROC_NULL if there is none.
    """

    def __init__(
        self,
        begun: Sending | Receiving | CollectiveFuture | None = None,
        *,
        source: int | None = None,
    ) -> None:
        self._begun = begun
        self._source = source

    def __bool__(self) -> bool:
        return self._begun is not None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Request) and (self is other or not (self or other))

    def __hash__(self) -> int:
        return id(self)

    def wait(self, status: Status | None = None) -> Any:
        """Waits; returns the object of an irecv, else None."""
        begun, self._begun = self._begun, None
        header, result = None, None
        if isinstance(begun, Receiving):
            header = begun.wait()
            if begun.kind == OBJECT:
                result = pickle.loads(begun.data.data)
        elif isinstance(begun, Sending):
            begun.wait()
        elif begun is not None:
            begun.result()
        if status is not None:
            status._set(self._source, header)
        return result

    def test(self, status: Status | None = None) -> tuple[bool, Any]:
        """Returns whether it is over, and then what wait() returns."""
        if self._begun is not None and not self._begun.done():
            return False, None
        return True, self.wait(status)

    def Wait(self, status: Status | None = None) -> Literal[True]:
        self.wait(status)
        return True

    def Test(self, status: Status | None = None) -> bool:
        return self.test(status)[0]

    def Free(self) -> None:
        """Forgets the request. Its message goes on: the buffer belongs to gradsync until the communicator ends."""
        self._begun = None

    @staticmethod
    def waitall(requests: Sequence[Request], statuses: Sequence[Status] | None = None) -> list[Any]:
        """Waits for all; returns what each wait() returns."""
        if isinstance(statuses, list):
            statuses += [Status() for _ in range(len(requests) - len(statuses))]
        messages = [each._begun for each in requests if isinstance(each._begun, (Sending, Receiving))]
        if len({each.tagged for each in messages}) > 1:
            _move_on_together(messages)
        given = [*(statuses or ()), *[None] * len(requests)]
        return [each.wait(status) for each, status in zip(requests, given, strict=False)]

    @staticmethod
    def Waitall(requests: Sequence[Request], statuses: Sequence[Status] | None = None) -> Literal[True]:
        Request.waitall(requests, statuses)
        return True

    @staticmethod
    def waitany(requests: Sequence[Request], status: Status | None = None) -> tuple[int, Any]:
        """Waits for the first that is over; returns its index and what its wait() returns; UNDEFINED if none is left.

        It has no deadline of its own.
        """
        while not (found := Request.testany(requests, status))[1]:
            time.sleep(1e-5)
        return found[0], found[2]

    @staticmethod
    def Waitany(requests: Sequence[Request], status: Status | None = None) -> int:
        return Request.waitany(requests, status)[0]

    @staticmethod
    def testany(requests: Sequence[Request], status: Status | None = None) -> tuple[int, bool, Any]:
        """Returns the index of the first that is over, True, and what its wait() returns; or UNDEFINED and False."""
        for i, each in enumerate(requests):
            if each and (found := each.test(status))[0]:
                return i, True, found[1]
        return UNDEFINED, not any(requests), None

    @staticmethod
    def Testany(requests: Sequence[Request], status: Status | None = None) -> tuple[int, bool]:
        return Request.testany(requests, status)[:2]

    @staticmethod
    def testall(requests: Sequence[Request], statuses: Sequence[Status] | None = None) -> tuple[bool, list[Any] | None]:
        """Returns whether all are over, and then what waitall() returns."""
        for each in requests:
            if each._begun is not None and not each._begun.done():
                return False, None
        return True, Request.waitall(requests, statuses)

    @staticmethod
    def Testall(requests: Sequence[Request], statuses: Sequence[Status] | None = None) -> bool:
        return Request.testall(requests, statuses)[0]


def _nothing() -> Request:
    """Returns the request of a message to or from PROC_NULL."""
    return Request(CollectiveFuture("no message", DONE, None), source=PROC_NULL)


def _move_on_together(messages: Sequence[Sending | Receiving]) -> None:
    """Waits for messages of several communicators, up to the deadline: a wait for one does not move those of others."""
    until = time.monotonic() + max([each.tagged.timeout_seconds for each in messages])
    while not all([each.done() for each in messages]) and time.monotonic() < until:  # noqa: C419 - it moves each on
        time.sleep(1e-5)


# -- Communicators ----------------------------------------------------------------------------------------------------


class _Parts(NamedTuple):
    """The buffer of a call that ends in v: a flat array, and for each rank how many elements begin where."""

    array: Any
    counts: list[int]
    displs: list[int]

    @property
    def is_dense(self) -> bool:
        """Whether the parts lie one after the other."""
        return self.displs == [0, *accumulate(self.counts)][:-1]

    def packed(self) -> Any:
        """Returns the parts one after the other: a view if they lie so."""
        if self.is_dense:
            return self.array[: sum(self.counts)]
        packed = self.room()
        self._copy(lambda part, whole: packed.__setitem__(part, self.array[whole]))
        return packed

    def room(self) -> Any:
        """Returns an array for the parts one after the other: a view of the buffer if they lie so there."""
        if self.is_dense:
            return self.array[: sum(self.counts)]
        return type(self.array)((sum(self.counts),), self.array.dtype)

    def unpack(self, packed: Any) -> None:
        """Puts what has come in `room` to its places."""
        if not self.is_dense:
            self._copy(lambda part, whole: self.array.__setitem__(whole, packed[part]))

    def _copy(self, copy: Callable[[slice, slice], None]) -> None:
        begin = 0
        for count, displ in zip(self.counts, self.displs, strict=True):
            copy(slice(begin, begin + count), slice(displ, displ + count))
            begin += count


class Group(_Shaped):
    """Some ranks of a communicator, for Create_group."""

    def __init__(self, ranks: Sequence[int], rank: int) -> None:
        self._ranks = list(ranks)
        self._world_rank = rank

    def Get_size(self) -> int:
        return len(self._ranks)

    def Get_rank(self) -> int:
        """Returns this process's rank in the group, or UNDEFINED."""
        return self._ranks.index(self._world_rank) if self._world_rank in self._ranks else UNDEFINED

    size, rank = property(Get_size), property(Get_rank)

    def Incl(self, ranks: Iterable[int]) -> Group:
        return Group([self._ranks[rank] for rank in ranks], self._world_rank)

    def Excl(self, ranks: Iterable[int]) -> Group:
        without = {self._ranks[rank] for rank in ranks}
        return Group([rank for rank in self._ranks if rank not in without], self._world_rank)

    def Free(self) -> None:
        pass


class Comm(_Shaped):
    """A gradsync communicator in the shape of an mpi4py communicator.

    Methods raise the errors of Communicator (collectives.py), and InvalidArgument for a buffer that does not fit. What
    only mpi4py has raises AttributeError, which says what to use.

    Messages with tags: from one rank to another they match by tag, in the order of the calls. Send returns when the
    other rank has taken the message in, and so does Ssend. Between two ranks, let messages of the gradsync communicator
    itself end first: they share one channel, and a mixture raises PlanMismatch.

    Args:
        communicator: the gradsync communicator; None: this is MPI.COMM_NULL.
    """

    def __init__(self, communicator: Communicator | None = None) -> None:
        self._of = communicator

    @property
    def communicator(self) -> Communicator:
        """The gradsync communicator.

        Raises:
            InvalidArgument: this is COMM_NULL.
        """
        if self._of is None:
            raise InvalidArgument("this is MPI.COMM_NULL: this rank is in no group of the Split, or has called Free")
        return self._of

    def __bool__(self) -> bool:
        return self._of is not None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Comm) and self._of is other._of

    def __hash__(self) -> int:
        return hash(self._of)

    def __repr__(self) -> str:
        return f"<MPI.Comm over {self._of!r}>" if self else "<MPI.COMM_NULL>"

    # -- The ranks -----------------------------------------------------------------------------------------------

    def Get_rank(self) -> int:
        return self.communicator.rank

    def Get_size(self) -> int:
        return self.communicator.world_size

    def Get_name(self) -> str:
        return self.communicator.recorder.group

    rank, size, name = property(Get_rank), property(Get_size), property(Get_name)

    @staticmethod
    def Compare(comm1: Comm, comm2: Comm) -> int:
        """Returns MPI.IDENT, CONGRUENT (the same ranks, in the same order), SIMILAR (in another order) or UNEQUAL."""
        if comm1 == comm2:
            return IDENT
        one, other = comm1.communicator.ranks, comm2.communicator.ranks
        if one == other or len(one) == len(other) == 1:  # this process alone
            return CONGRUENT
        return SIMILAR if sorted(one) == sorted(other) else UNEQUAL

    def Is_inter(self) -> bool:
        return False

    def Is_intra(self) -> bool:
        return True

    def Get_group(self) -> Group:
        return Group(range(self.size), self.rank)

    group = property(Get_group)

    def Split(self, color: int = 0, key: int = 0) -> Comm:
        """Divides the ranks, one group for each color. With color MPI.UNDEFINED this rank gets COMM_NULL."""
        return wrap(self._settled().split(None if color == UNDEFINED else color, key))

    def Split_type(self, split_type: int, key: int = 0, info: Any = None) -> Comm:
        """Divides the ranks by machine: `split_type` needs to be MPI.COMM_TYPE_SHARED."""
        if split_type != 0:
            raise InvalidArgument("Split_type has MPI.COMM_TYPE_SHARED only: the ranks of each machine; else use Split")
        by_machine = self._settled().split_by_machine()
        return wrap(by_machine.split(0, key)) if key else wrap(by_machine)

    def Create_group(self, group: Group, tag: int = 0) -> Comm:
        """Makes a communicator of the ranks of a group, in their order. Only its members need to call it."""
        members = group._ranks
        made = self._settled().new_group(members)
        return wrap(made.split(0, members.index(self.rank)) if made and members != sorted(members) else made)

    Create = Create_group

    def Dup(self, info: Any = None) -> Comm:
        return wrap(self._settled().new_group(range(self.size)))

    Clone = Dup

    def Free(self) -> None:
        """Closes the communicator; this is COMM_NULL then."""
        self.communicator.close()
        self._of = None

    def Abort(self, errorcode: int = 0) -> NoReturn:
        """Ends this process, with exit code `errorcode` or 1; the others get RankFailed."""
        reason = f"the program called Abort({errorcode})"
        self.communicator.abort(reason)
        sys.stdout.flush()
        print(f"{self.communicator.label}: {reason}", file=sys.stderr, flush=True)
        os._exit(errorcode & 0xFF or 1)  # the system keeps the lowest byte, and that of 256 says success

    # -- Buffers -------------------------------------------------------------------------------------------------

    def _settled(self) -> Communicator:
        """Returns the communicator for a collective; over NCCL the posted receives go before it."""
        self.communicator.tagged.settle()
        return self.communicator

    def _refuse(self, what: str, why: str) -> NoReturn:
        raise InvalidArgument(f"{self.communicator.label}: {what} {why}")

    def _unpacked(self, what: str, spec: Any, *, is_vector: bool) -> tuple[Any, Any, Any]:
        """Returns a buffer as a flat array of its type, the counts and the displacements (None where not given)."""
        data, rest = (spec[0], list(spec[1:])) if isinstance(spec, (list, tuple)) and spec else (spec, [])
        datatype = rest.pop() if rest and isinstance(rest[-1], (Datatype, str)) else None
        counts, displs = [*rest, None, None][:2]
        if isinstance(counts, tuple) or (isinstance(counts, list) and not is_vector):
            if len(rest) != 1 or len(counts) != 2:
                self._refuse(what, f"needs a buffer as [array, counts, type] or the like, got {rest}")
            counts, displs = counts
        if len(rest) > 2:
            self._refuse(what, f"needs a buffer of 2 to 4 items, got {len(spec)}")
        if isinstance(datatype, str):
            datatype = MPI._typedict[datatype]
        return self._flat(what, data, datatype), counts, displs

    def _flat(self, what: str, data: Any, datatype: Datatype | None) -> Any:
        """Returns the elements of a contiguous array, or of another buffer, as a flat array: a view."""
        if data is None:
            data = np.empty(0, np.uint8)
        elif isinstance(data, np.generic):
            data = np.asarray(data)
            data.flags.writeable = False  # a copy: what came into it would be lost
        elif not any(hasattr(data, name) for name in ("dtype", "__dlpack__", "__cuda_array_interface__")):
            if data is IN_PLACE:
                place = "recvbuf on the root" if what.startswith("Scatter") else "sendbuf, the first argument"
                self._refuse(what, f"takes MPI.IN_PLACE in place of {place}")
            try:
                data = np.asarray(memoryview(data))
            except TypeError:
                self._refuse(what, f"needs an array or another buffer, got {type(data).__name__}")
        array = self.communicator.native_array(data, what)
        if not array.flags.c_contiguous:
            array = array.T
            if not array.flags.c_contiguous:
                self._refuse(what, f"needs a contiguous array, got strides {array.T.strides}: pass a copy")
        flat = array.reshape(-1)
        if datatype is None or datatype.dtype == flat.dtype:
            return flat
        wanted = datatype.dtype
        is_raw = wanted.str in _RAW or (flat.dtype.str in _RAW and flat.size % wanted.itemsize == 0)
        if not is_raw and flat.size:
            self._refuse(what, f"got an array of {flat.dtype} with the type MPI.{datatype.name}, which is {wanted}")
        return flat.view(wanted) if is_raw else flat[:0].astype(wanted)

    def _elements(self, what: str, spec: Any, blocks: int = 1) -> Any:
        """Returns a buffer as a flat array with `blocks` times its count of elements."""
        flat, count, displ = self._unpacked(what, spec, is_vector=False)
        begin = 0 if displ is None else operator.index(displ)
        size = flat.size - begin if count is None else operator.index(count) * blocks
        if begin < 0 or size < 0 or begin + size > flat.size:
            self._refuse(what, f"needs {size} elements from {begin}, but its array has {flat.size}")
        if size % blocks:
            self._refuse(what, f"needs a part for each of {blocks} ranks, got {size} elements; see {what}v")
        return flat[begin : begin + size]

    def _parts(self, what: str, spec: Any) -> _Parts:
        """Returns the buffer of a call that ends in v."""
        n = self.size
        flat, counts, displs = self._unpacked(what, spec, is_vector=True)
        if counts is None:
            counts = [flat.size // n + (rank < flat.size % n) for rank in range(n)]
        if integer_of(counts) is not None:
            counts = [counts] * n
        if displs is None:
            displs = [0, *accumulate(counts)][:-1]
        elif integer_of(displs) is not None:
            displs = [rank * displs for rank in range(n)]
        counts, displs = [int(count) for count in counts], [int(displ) for displ in displs]
        fits = len(counts) == len(displs) == n and min(counts + displs) >= 0
        if not fits or max(map(sum, zip(counts, displs, strict=True))) > flat.size:
            self._refuse(what, f"needs {n} counts and displacements within {flat.size} elements: {counts}, {displs}")
        return _Parts(flat, counts, displs)

    def _operator(self, what: str, op: Op) -> ReduceOp:
        if not isinstance(op, Op) or op.of_arrays is None:
            raise UnsupportedDtype(
                f"{self.communicator.label}: {what} of arrays has MPI.SUM, PROD, MIN and MAX, got {op!r}: allreduce of "
                "objects has it; for bools MIN is LAND, and MAX is LOR"
            )
        return op.of_arrays

    # -- Collectives of arrays -----------------------------------------------------------------------------------

    def Barrier(self) -> None:
        self._settled().barrier()

    def _reduction(self, what: str, sendbuf: Any, recvbuf: Any, op: Op) -> tuple[Any, ReduceOp, Any]:
        """Returns the array to send, the operator and the array for the result."""
        target = self._elements(what, recvbuf)
        if _is_in_place(sendbuf):
            return target, self._operator(what, op), target
        source = self._elements(what, sendbuf)
        if target.size > source.size:  # MPI counts what is sent
            target = target[: source.size]
        self._check_room(what, target, source.size, source.dtype)
        return source, self._operator(what, op), target

    def _check_room(self, what: str, target: Any, size: int, dtype: Any) -> None:
        """Raises InvalidArgument in the words of MPI, where the array for a result does not fit."""
        if (target.size, target.dtype) != (size, dtype):
            self._refuse(what, f"needs recvbuf with {size} elements of {dtype}, got {target.size} of {target.dtype}")

    def Allreduce(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> None:
        source, by, target = self._reduction("Allreduce", sendbuf, recvbuf, op)
        self._settled().all_reduce(source, by, out=target)

    def Iallreduce(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Request:
        """Begins an Allreduce. On the CPU it runs within the call, and waits there for the other ranks."""
        source, by, target = self._reduction("Iallreduce", sendbuf, recvbuf, op)
        return Request(self._settled().asynchronous.all_reduce(source, by, out=target))

    def Reduce(self, sendbuf: Any, recvbuf: Any, op: Op = SUM, root: int = 0) -> None:
        if self.rank == root:
            source, by, target = self._reduction("Reduce", sendbuf, recvbuf, op)
        else:
            source, by, target = self._elements("Reduce", sendbuf), self._operator("Reduce", op), None
        self._settled().reduce(source, by, root, out=target)

    def Reduce_scatter(self, sendbuf: Any, recvbuf: Any, recvcounts: Sequence[int] | None = None, op: Op = SUM) -> None:
        target = self._elements("Reduce_scatter", recvbuf)
        if recvcounts is None:
            numbers = self._settled().share_numbers("Reduce_scatter", [target.size])
            recvcounts = [number for [number] in numbers]
        counts = [int(count) for count in recvcounts]
        source = target[: sum(counts)] if _is_in_place(sendbuf) else self._elements("Reduce_scatter", sendbuf)
        out = target[: counts[self.rank]]
        by = self._operator("Reduce_scatter", op)
        self._settled().reduce_scatter(source, by, sizes=counts, out=out)

    def Reduce_scatter_block(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> None:
        n = self.size if _is_in_place(sendbuf) else 1
        count = self._elements("Reduce_scatter_block", recvbuf, n).size // n
        self.Reduce_scatter(sendbuf, recvbuf, [count] * self.size, op)

    def Bcast(self, buf: Any, root: int = 0) -> None:
        self._settled().broadcast(self._elements("Bcast", buf), root)

    def Allgather(self, sendbuf: Any, recvbuf: Any) -> None:
        target = self._elements("Allgather", recvbuf, self.size)
        source = self._own_part(target) if _is_in_place(sendbuf) else self._elements("Allgather", sendbuf)
        self._check_room("Allgather", target, source.size * self.size, source.dtype)
        self._settled().all_gather(source, out=target)

    def Allgatherv(self, sendbuf: Any, recvbuf: Any) -> None:
        parts = self._parts("Allgatherv", recvbuf)
        source = self._own_of(parts) if _is_in_place(sendbuf) else self._elements("Allgatherv", sendbuf)
        parts.unpack(self._settled().all_gather(source, sizes=parts.counts, out=parts.room()))

    def Gather(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        target = self._elements("Gather", recvbuf, self.size) if self.rank == root else None
        source = self._own_part(target) if _is_in_place(sendbuf) else self._elements("Gather", sendbuf)
        if target is not None:
            self._check_room("Gather", target, source.size * self.size, source.dtype)
        self._settled().gather(source, root, out=target)

    def Gatherv(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        """Gathers parts of different sizes. The ranks first exchange the sizes, which only the root knows in MPI."""
        parts = self._parts("Gatherv", recvbuf) if self.rank == root else None
        source = self._own_of(parts) if _is_in_place(sendbuf) and parts else self._elements("Gatherv", sendbuf)
        counts = self._compared("Gatherv", source.size, parts, root)
        gathered = self._settled().gather(source, root, sizes=counts, out=parts.room() if parts else None)
        if parts:
            parts.unpack(gathered)

    def Scatter(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        source = self._elements("Scatter", sendbuf, self.size) if self.rank == root else None
        target = self._own_part(source) if _is_in_place(recvbuf) else self._elements("Scatter", recvbuf)
        self._settled().scatter(source, root, out=target)

    def Scatterv(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        """Scatters parts of different sizes. The ranks first exchange the sizes, which only the root knows in MPI."""
        parts = self._parts("Scatterv", sendbuf) if self.rank == root else None
        target = self._own_of(parts) if _is_in_place(recvbuf) and parts else self._elements("Scatterv", recvbuf)
        counts = self._compared("Scatterv", target.size, parts, root)
        self._settled().scatter(parts.packed() if parts else None, root, sizes=counts, out=target)

    def Alltoall(self, sendbuf: Any, recvbuf: Any) -> None:
        target = self._elements("Alltoall", recvbuf, self.size)
        source = target if _is_in_place(sendbuf) else self._elements("Alltoall", sendbuf, self.size)
        self._check_room("Alltoall", target, source.size, source.dtype)
        self._settled().all_to_all(source, out=target)

    def Alltoallv(self, sendbuf: Any, recvbuf: Any) -> None:
        received = self._parts("Alltoallv", recvbuf)
        sent = received if _is_in_place(sendbuf) else self._parts("Alltoallv", sendbuf)
        sizes = {"send_sizes": sent.counts, "recv_sizes": received.counts}
        received.unpack(self._settled().all_to_all(sent.packed(), **sizes, out=received.room()))

    def _own_part(self, whole: Any) -> Any:
        """Returns this rank's part of an array with equal parts."""
        count = whole.size // self.size
        return whole[self.rank * count : (self.rank + 1) * count]

    def _own_of(self, parts: _Parts) -> Any:
        begin = parts.displs[self.rank]
        return parts.array[begin : begin + parts.counts[self.rank]]

    def _compared(self, what: str, own: int, parts: _Parts | None, root: int) -> list[int]:
        """Returns the size of each rank's part; all ranks raise if the root has other counts."""
        counts = parts.counts if parts else [0] * self.size
        shared = self._settled().share_numbers(what, [own, *counts])
        sizes, of_root = [numbers[0] for numbers in shared], shared[root][1:]
        if sizes != of_root:
            self._refuse(what, f"has parts of {sizes} elements on the ranks, but the root, rank {root}, has {of_root}")
        return sizes

    # -- Collectives of Python objects ---------------------------------------------------------------------------

    barrier = Barrier

    def bcast(self, obj: Any, root: int = 0) -> Any:
        return self._settled().objects.broadcast(obj, root)

    def gather(self, sendobj: Any, root: int = 0) -> list[Any] | None:
        return self._settled().objects.gather(sendobj, root)

    def allgather(self, sendobj: Any) -> list[Any]:
        return self._settled().objects.all_gather(sendobj)

    def scatter(self, sendobj: Sequence[Any] | None, root: int = 0) -> Any:
        return self._settled().objects.scatter(list(sendobj) if sendobj is not None else None, root)

    def alltoall(self, sendobj: Sequence[Any]) -> list[Any]:
        pickles = [pickle.dumps(each, pickle.HIGHEST_PROTOCOL) for each in sendobj]
        if len(pickles) != self.size:
            self._refuse("alltoall", f"needs {self.size} objects, one for each rank, got {len(pickles)}")
        sizes = [len(each) for each in pickles]
        received = self._settled().all_to_all(np.array(sizes, np.int64)).tolist()
        data = np.frombuffer(b"".join(pickles), np.uint8)
        data = self.communicator.all_to_all(data, send_sizes=sizes, recv_sizes=received)
        ends = [*accumulate(received)]
        return [pickle.loads(data[end - size : end].data) for size, end in zip(received, ends, strict=True)]

    def reduce(self, sendobj: Any, op: Op | Callable[[Any, Any], Any] = SUM, root: int = 0) -> Any:
        """Reduces objects in the order of the ranks. Any function of two objects may be `op`."""
        gathered = self.gather(sendobj, root)
        return None if gathered is None else reduce(op, gathered)

    def allreduce(self, sendobj: Any, op: Op | Callable[[Any, Any], Any] = SUM) -> Any:
        """Reduces objects in the order of the ranks. Any function of two objects may be `op`."""
        return reduce(op, self.allgather(sendobj))

    # -- Messages ------------------------------------------------------------------------------------------------

    def Isend(self, buf: Any, dest: int, tag: int = 0) -> Request:
        if dest == PROC_NULL:
            return _nothing()
        flat = self._elements("Send", buf)
        return self._begin_send(flat.view(np.uint8), dest, tag, _kind(flat.dtype))

    def Send(self, buf: Any, dest: int, tag: int = 0) -> None:
        self.Isend(buf, dest, tag).wait()

    Issend, Ssend = Isend, Send

    def Irecv(self, buf: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Request:
        if source == PROC_NULL:
            return _nothing()
        flat = self._elements("Recv", buf)
        return self._begin_receive(flat.view(np.uint8), source, tag, _kind(flat.dtype))

    def Recv(self, buf: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> None:
        self.Irecv(buf, source, tag).wait(status)

    def Sendrecv(
        self,
        sendbuf: Any,
        dest: int,
        sendtag: int = 0,
        recvbuf: Any = None,
        source: int = ANY_SOURCE,
        recvtag: int = ANY_TAG,
        status: Status | None = None,
    ) -> None:
        receiving = self.Irecv(recvbuf, source, recvtag)
        sending = self.Isend(sendbuf, dest, sendtag)
        receiving.wait(status)
        sending.wait()

    def Sendrecv_replace(
        self,
        buf: Any,
        dest: int,
        sendtag: int = 0,
        source: int = ANY_SOURCE,
        recvtag: int = ANY_TAG,
        status: Status | None = None,
    ) -> None:
        sent = self._elements("Sendrecv_replace", buf).copy()
        self.Sendrecv(sent, dest, sendtag, buf, source, recvtag, status)

    def isend(self, obj: Any, dest: int, tag: int = 0) -> Request:
        if dest == PROC_NULL:
            return _nothing()
        data = np.frombuffer(pickle.dumps(obj, pickle.HIGHEST_PROTOCOL), np.uint8)
        return self._begin_send(data, dest, tag, OBJECT)

    def send(self, obj: Any, dest: int, tag: int = 0) -> None:
        self.isend(obj, dest, tag).wait()

    issend, ssend = isend, send

    def irecv(self, buf: Any = None, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Request:
        """Begins to receive an object, which the request's wait() returns. `buf` is ignored: any size will do."""
        if source == PROC_NULL:
            return _nothing()
        return self._begin_receive(None, source, tag, OBJECT)

    def recv(self, buf: Any = None, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> Any:
        return self.irecv(buf, source, tag).wait(status)

    def sendrecv(
        self,
        sendobj: Any,
        dest: int,
        sendtag: int = 0,
        recvbuf: Any = None,
        source: int = ANY_SOURCE,
        recvtag: int = ANY_TAG,
        status: Status | None = None,
    ) -> Any:
        receiving = self.irecv(None, source, recvtag)
        sending = self.isend(sendobj, dest, sendtag)
        received = receiving.wait(status)
        sending.wait()
        return received

    def _begin_send(self, data: Any, dest: int, tag: int, kind: str) -> Request:
        number = integer_of(tag)
        if number is None or not 0 <= number <= _LARGEST_TAG:
            self._refuse("Send", f"needs a tag from 0 to {_LARGEST_TAG}, got {tag!r}")
        return Request(self.communicator.tagged.send(data, self._peer("Send", "dest", dest), number, kind))

    def _begin_receive(self, room: Any, source: int, tag: int, kind: str) -> Request:
        if source == ANY_SOURCE:
            self._refuse(
                "Recv", "needs a source: gradsync.mpi has no MPI.ANY_SOURCE; post an Irecv for each rank, and Waitany"
            )
        number = integer_of(tag)
        if number is None or not ANY_TAG <= number <= _LARGEST_TAG:
            self._refuse("Recv", f"needs a tag from 0 to {_LARGEST_TAG}, or MPI.ANY_TAG, got {tag!r}")
        source = self._peer("Recv", "source", source)
        return Request(self.communicator.tagged.receive(room, source, number, kind), source=source)

    def _peer(self, what: str, name: str, rank: Any) -> int:
        number = integer_of(rank)
        if number is None or not 0 <= number < self.size:
            self._refuse(what, f"needs {name} to be a rank from 0 to {self.size - 1}, or MPI.PROC_NULL, got {rank!r}")
        return number


def _kind(dtype: Any) -> str:
    return "" if dtype.str in _RAW else dtype.str


def wrap(communicator: Any) -> Comm:
    """Returns a gradsync communicator in mpi4py's shape; a NonMember, of a group without this rank, as COMM_NULL.

    Raises:
        InvalidArgument: it is neither. Of mpi4py's communicator wrap(gs.from_mpi(comm)).
    """
    if isinstance(communicator, NonMember):
        return Comm()
    return Comm(group_or_world(communicator, "wrap", "communicator"))


# -- The module -------------------------------------------------------------------------------------------------------


_Comm = Comm  # which within the class below is an attribute


class _Module:
    """What stands in place of the module mpi4py.MPI."""

    Comm = Intracomm = Comm
    Request, Status, Datatype, Op, Group = Request, Status, Datatype, Op, Group
    Exception = GradsyncError
    COMM_NULL, REQUEST_NULL, DATATYPE_NULL = Comm(), Request(), None
    IN_PLACE, PROC_NULL, ANY_SOURCE, ANY_TAG, UNDEFINED = IN_PLACE, PROC_NULL, ANY_SOURCE, ANY_TAG, UNDEFINED
    IDENT, CONGRUENT, SIMILAR, UNEQUAL = IDENT, CONGRUENT, SIMILAR, UNEQUAL
    THREAD_SINGLE, THREAD_FUNNELED, THREAD_SERIALIZED, THREAD_MULTIPLE = range(4)
    COMM_TYPE_SHARED = SUCCESS = 0

    def __init__(self) -> None:
        self._typedict = {each.dtype.char: each for each in reversed(_TYPES.values())}
        self._self: _Comm | None = None
        self._is_finalized = False

    @property
    def COMM_WORLD(self) -> _Comm:
        """The world. Where there is no process group, init_process_group() makes it."""
        return wrap(get_communicator() if is_initialized() else init_process_group())

    @property
    def COMM_SELF(self) -> _Comm:
        """A communicator of this rank alone."""
        if self._self is None or self._self.communicator.closed:
            self._self = wrap(local_communicator())
        return self._self

    def Init(self) -> None:
        self.COMM_WORLD  # noqa: B018

    def Finalize(self) -> None:
        """Leaves the process group; see gs.destroy_process_group()."""
        destroy_process_group()
        self._is_finalized = True

    def Is_initialized(self) -> bool:
        return self._is_finalized or is_initialized()

    def Is_finalized(self) -> bool:
        return self._is_finalized and not is_initialized()

    def Query_thread(self) -> int:
        """Returns THREAD_SERIALIZED: any thread may use a communicator, one at a time."""
        return self.THREAD_SERIALIZED

    @staticmethod
    def Wtime() -> float:
        return time.perf_counter()

    @staticmethod
    def Wtick() -> float:
        return time.get_clock_info("perf_counter").resolution

    @staticmethod
    def Is_thread_main() -> bool:
        return threading.current_thread() is threading.main_thread()

    @staticmethod
    def Get_library_version() -> str:
        return f"gradsync {__version__}"

    @staticmethod
    def Get_processor_name() -> str:
        return socket.gethostname()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = _OPS.get(name) or _TYPES.get(name)
        if found is None:
            _missing("MPI", name)
        return found

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *_OPS, *_TYPES]


MPI = _Module()
