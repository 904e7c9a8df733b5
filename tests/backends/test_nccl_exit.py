"""The end of a program while a collective is stuck: it ends, with its own exit code, and says that work was lost."""

import pytest

from ranks import PLACES

SCRIPT = """
    import contextlib
    import sys

    import cupy
    from cupy.cuda.nccl import NcclCommunicator

    import gradsync as gs

    world = gs.init_process_group("nccl")
    callback = gs.AllreduceCallback("sum")

    def step():
        with callback.backward():
            return callback("w", cupy.ones(3))

    step().numpy()
    world.barrier()
    if world.rank == 1:
        NcclCommunicator.allReduce = lambda *_: None  # it agrees on the next collective, and its GPU never comes to it
        step()
        with contextlib.suppress(gs.GradsyncError):
            world.barrier()
        with contextlib.suppress(gs.GradsyncError):
            gs.destroy_process_group()
        sys.exit(0)
    step()
    if "exit" in sys.argv:
        sys.exit(7)
"""


@pytest.mark.slow  # 10 s: how long the end waits for what runs
@pytest.mark.parametrize(("how", "code", "word"), [("end", 0, "CollectiveTimeout"), ("exit", 7, "")])
def test_a_program_ends_beside_a_stuck_collective(cli, script, how, code, word):
    fake = PLACES["fake"]
    variables = {"PYTHONPATH": fake.folders[0], "FAKE_CUPY_HANG": "1", **fake.environment}
    result = cli("run", "-n", 2, script(SCRIPT), how, environment=variables)
    assert result.code == code, result.err
    assert word in result.err
