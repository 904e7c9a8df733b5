"""CuPy's binding of NCCL, and the real libnccl as far as a machine without a GPU can go."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

import gradsync as gs

# Source: ncclDataType_t, ncclRedOp_t and ncclResult_t. The fake CuPy has the same numbers.
CODES = {"SUM": 0, "PROD": 1, "MAX": 2, "MIN": 3, "AVG": 4, "INT8": 0, "UINT8": 1, "INT32": 2, "UINT32": 3, "INT64": 4}
CODES |= {"UINT64": 5, "FLOAT16": 6, "FLOAT32": 7, "FLOAT64": 8, "BFLOAT16": 9}
RESULTS = ["UnhandledCudaError", "SystemError", "InternalError", "InvalidArgument", "InvalidUsage", "RemoteError"]
RESULTS += ["InProgress", "Timeout"]


@pytest.mark.ranks(1, on=("cupy",))
def test_cupy_has_the_names_numbers_and_arguments_that_gradsync_uses(comm) -> None:
    """The communicator between processes takes the arguments of CuPy's own, so calls that pass here pass there."""
    from cupy.cuda import nccl

    from real_cupy import nccl_between_processes as ours

    assert {name: getattr(nccl, f"NCCL_{name}") for name in CODES} == CODES
    first, second = nccl.get_unique_id(), nccl.get_unique_id()
    assert len(bytes(first)) == 128
    assert first != second
    for name, method in vars(ours.NcclCommunicator).items():
        if name.startswith("_"):
            continue
        real = getattr(ours.of_cupy["NcclCommunicator"], name)
        given = len(inspect.signature(method).parameters) - 1
        try:
            parameters = list(inspect.signature(real).parameters.values())[1:]
        except ValueError:  # without a signature: there the docstring begins with it
            assert name in (real.__doc__ or name)
            continue
        needed = [parameter for parameter in parameters if parameter.default is inspect.Parameter.empty]
        assert len(needed) <= given <= len(parameters), name


@pytest.mark.ranks(1, on=("cupy",))
def test_each_result_of_nccl_is_an_error_with_its_code_and_name(comm) -> None:
    """CuPy's own error does not know the codes 7 and 8."""
    import cupy
    from cupy.cuda import nccl

    array = cupy.asarray(np.ones(3))
    for code, name in enumerate(RESULTS, 1):

        def fail(*arguments: int, code: int = code) -> None:
            raise nccl.NcclError(code)

        group = comm.new_group([0])
        with pytest.MonkeyPatch.context() as patch, pytest.raises(gs.NcclError) as caught:
            patch.setattr(nccl.NcclCommunicator, "allReduce", fail)
            group.all_reduce(array)
        assert (caught.value.code, caught.value.name) == (code, f"nccl{name}")
        with pytest.raises(gs.CommunicatorClosed):
            group.all_reduce(array)
        comm.all_reduce(array)  # of another communicator


@pytest.mark.ranks(1, on=("cupy",), fresh=True)
def test_a_real_communicator_fails_with_the_words_of_nccl(rank) -> None:
    """The real NCCL finds no GPU behind the stub of the driver. Of several ranks the others might hear of it first."""
    from cupy.cuda import nccl

    from real_cupy import nccl_between_processes as ours

    nccl.NcclCommunicator = ours.of_cupy["NcclCommunicator"]
    with pytest.raises(gs.NcclError) as caught:
        gs.init_process_group("nccl")
    assert (caught.value.code, caught.value.name) == (1, "ncclUnhandledCudaError")
    assert "libnccl.so" in str(caught.value)
