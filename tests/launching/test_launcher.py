import os
import socket
import subprocess
import sys

import command
import pytest
import rank_functions

import gradsync as gs


def test_results_by_rank_inside_a_group():
    assert rank_functions.rank_in_group(10, factor=3) == [30, 33]
    assert rank_functions.rank_in_group.__name__ == "rank_in_group"
    assert not gs.is_initialized()


def test_applied_to_a_function_that_keeps_its_name():
    assert rank_functions.wrapped_elsewhere("x") == [("x", True)]


def test_failing_rank_raises_with_rank_exit_code_and_traceback():
    with pytest.raises(gs.RankFailed, match=r"rank 1 .* failed with exit code 1.*\n\nTraceback") as caught:
        rank_functions.fail_in_group()
    error = caught.value
    assert (error.rank, error.exit_code) == (1, 1)
    assert error.traceback_text.endswith("ValueError: boom")
    assert "gradsync/launching" not in error.traceback_text


def test_exit_code_of_a_failing_rank():
    with pytest.raises(gs.RankFailed, match=r"failed with exit code 3; all other ranks were ended$") as caught:
        rank_functions.exit_3()
    assert caught.value.exit_code == 3


def test_what_a_rank_cannot_find_is_refused_before_any_process_starts(monkeypatch):
    monkeypatch.setattr("gradsync.launching.supervisor.RankProcess", None)

    @gs.launcher
    def inner():
        pass

    with pytest.raises(gs.InvalidArgument, match="not as a lambda or inside another function"):
        inner()
    with pytest.raises(gs.InvalidArgument, match="not as a lambda or inside another function"):
        gs.launcher(lambda: 0)()
    with pytest.raises(gs.InvalidArgument, match="arguments of rank_in_group need to pickle"):
        rank_functions.rank_in_group(sys.stdout)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"n_gpus": 0}, "n_gpus to be an integer of at least 1, got 0"),
        ({"n_gpus": "2"}, "got '2'"),
        ({"n_gpus": 2, "world_size": 4}, "world_size = n_gpus = 2, got 4"),
        ({"rank_start": 2}, "rank_start 0, got 2; this version"),
        ({"master_ip": "10.0.0.1"}, "master_ip 'localhost' or '127.0.0.1', got '10.0.0.1'"),
        ({"port": -1}, "port to be 0 to 65535"),
        ({"device_type": "tpu"}, "device_type 'auto', 'cpu' or 'gpu', got 'tpu'"),
        ({"device_type": "cpu", "backend": "nccl"}, "NCCL moves GPU arrays only"),
    ],
)
def test_bad_options_are_refused_at_decoration(options, text):
    with pytest.raises(gs.InvalidArgument, match=text):
        gs.launcher(**options)


def test_decorating_what_is_no_function():
    with pytest.raises(gs.InvalidArgument, match=r"needs a function, got 3; for 3 ranks write launcher\(n_gpus=3\)"):
        gs.launcher(3)


def test_decorated_function_of_a_script(tmp_path):
    script = command.write_script(
        tmp_path,
        """
        import gradsync as gs
        @gs.launcher(n_gpus=2)
        def work(offset):
            return gs.get_communicator().rank + offset
        if __name__ == "__main__":
            print(work(5))
        """,
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[5, 6]\n", "")


def test_taken_port_is_told():
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        run = gs.launcher(n_gpus=1, port=port)(rank_functions.plain)
        with pytest.raises(gs.RendezvousError, match=str(port)):
            run(1)


def test_decorating_starts_nothing():
    before = set(os.listdir("/proc/self/fd"))
    gs.launcher(n_gpus=2)(rank_functions.plain)
    assert set(os.listdir("/proc/self/fd")) == before
