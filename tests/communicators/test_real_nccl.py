"""The real CuPy and the real libnccl, as far as a machine without a GPU can go: what the stand-in may have wrong."""

from __future__ import annotations

import hashlib
import inspect
import time
from contextlib import nullcontext
from typing import Any

import pytest

import gradsync as gs
from contract import expect
from gradsync import process_group
from places import SHM

WORLD_SIZE = 3


def why_not() -> str | None:
    """Returns why the real libraries cannot be loaded here, or None where they can."""
    try:
        import cupy
    except ImportError as error:
        return f"CuPy cannot be imported: {error}"
    if not hasattr(cupy, "RawKernel"):
        return "this CuPy is the stand-in"
    from gradsync.communicators.nccl.library import check_library

    try:
        check_library()
    except gs.BackendUnavailable as error:
        return str(error)
    return None


pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


def test_ids_and_versions() -> None:
    from cupy.cuda import nccl

    from gradsync.communicators.nccl.library import check_library, last_error, library_path, version_text

    assert len(bytes(nccl.get_unique_id())) == 128
    assert nccl.get_unique_id() != nccl.get_unique_id()
    assert check_library() >= 22000
    assert version_text(check_library()).startswith("2.")
    assert "libnccl.so" in library_path()
    assert isinstance(last_error(), str)


def test_codes_are_as_the_stand_in_has_them() -> None:
    from cupy.cuda import nccl

    codes = {"SUM": 0, "PROD": 1, "MAX": 2, "MIN": 3, "AVG": 4, "INT8": 0, "UINT8": 1, "INT32": 2, "UINT32": 3}
    codes |= {"INT64": 4, "UINT64": 5, "FLOAT16": 6, "FLOAT32": 7, "FLOAT64": 8, "BFLOAT16": 9}
    assert {name: getattr(nccl, f"NCCL_{name}") for name in codes} == codes


def test_the_table_of_errors() -> None:
    """CuPy's own error does not know the codes 7 and 8."""
    import cupy
    from cupy.cuda import nccl

    from gradsync.communicators.nccl.library import RESULTS, Nccl

    unconnected = Nccl.__new__(Nccl)  # a connected one needs a GPU
    unconnected._label, unconnected.binding, unconnected._cupy = "rank 0/1", nccl, cupy
    for code, (name, _) in RESULTS.items():
        with pytest.raises(gs.NcclError) as caught, unconnected._errors("ncclAllReduce"):
            raise nccl.NcclError(code)
        assert (caught.value.code, caught.value.name) == (code, name)
    assert set(range(1, 9)) == set(RESULTS)


def test_the_methods_have_the_arguments_that_are_given() -> None:
    """By their number: CuPy's are compiled, and a wrong one is a TypeError before NCCL is asked."""
    from cupy.cuda import nccl

    given = {"allReduce": 6, "reduce": 7, "reduceScatter": 6, "broadcast": 6, "allGather": 5, "send": 5, "recv": 5}
    given |= {"abort": 0, "destroy": 0, "check_async_error": 0}
    for name, count in given.items():
        try:
            parameters = list(inspect.signature(getattr(nccl.NcclCommunicator, name)).parameters.values())[1:]
        except ValueError:  # without one: there the docstring begins with it
            continue
        needed = [parameter for parameter in parameters if parameter.default is inspect.Parameter.empty]
        assert len(needed) <= count <= len(parameters), name


def carry_an_id(comm: Any) -> str:
    from cupy.cuda import nccl

    client = process_group._client
    assert client is not None
    if comm.rank == 0:
        client.set("real id", bytes(nccl.get_unique_id()))
    unique_id = client.get("real id", timeout_seconds=30)
    assert len(unique_id) == 128
    return hashlib.sha256(unique_id).hexdigest()


def test_an_id_comes_to_all_ranks() -> None:
    assert len(set(SHM.run(WORLD_SIZE, carry_an_id))) == 1


def join_without_a_gpu(comm: Any) -> tuple[str, str, int]:
    import cupy

    from gradsync.communicators.nccl.library import Nccl

    client = process_group._client
    assert client is not None
    plain = expect(gs.NcclError, lambda: Nccl(client, 0, "without a device", time.monotonic() + 30))
    cupy.cuda.Device = lambda _: nullcontext()  # which CUDA refuses first
    error = expect(gs.NcclError, lambda: Nccl(client, 0, "real", time.monotonic() + 30))
    return str(plain), str(error), error.code


def test_a_real_communicator_fails_with_nccls_own_words_on_all_ranks() -> None:
    import cupy

    try:
        if cupy.cuda.runtime.getDeviceCount():
            pytest.skip("there is a GPU: tests marked gpu go further")
    except cupy.cuda.runtime.CUDARuntimeError:
        pass
    for rank, (plain, text, code) in enumerate(SHM.run(WORLD_SIZE, join_without_a_gpu)):
        assert plain.startswith(f"rank {rank}/{WORLD_SIZE}: ncclCommInitRank: cudaError")
        assert code == 1
        begin = f"rank {rank}/{WORLD_SIZE}: ncclCommInitRank failed with ncclUnhandledCudaError (1): Cuda failure "
        assert text.startswith(begin), text
        assert "libnccl.so" in text
