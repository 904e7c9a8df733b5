import contextlib
import secrets
import subprocess
import sys

import command
import pytest
import rank_functions

import gradsync as gs
from gradsync import environment
from gradsync.rendezvous.secret_files import Endpoint, publish, secret_path

SECRET = secrets.token_hex(32)


@pytest.fixture(autouse=True)
def _own_runtime_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(environment, "_secret", None)


def test_master_ip_is_bound_with_a_secret(monkeypatch):
    monkeypatch.setenv("GRADSYNC_SECRET", SECRET)
    port = gs.free_port()
    run = gs.launcher(rank_functions.address_and_secrets, n_gpus=2, master_ip="0.0.0.0", port=port)
    assert run() == [(f"0.0.0.0:{port}", "0.0.0.0", [])] * 2
    assert run()[0][0] == f"0.0.0.0:{port}"  # the secret is kept for the next call
    monkeypatch.setattr(environment, "_secret", None)
    with pytest.raises(gs.AuthenticationError, match="launcher at 0.0.0.0 needs a secret, because other machines"):
        run()


NODE = """
    import os, signal, sys
    import gradsync as gs
    def work(role):
        os.write(1, b"%d\\n" % os.getpid())
        if role == "fail":
            raise ValueError("boom")
        while True:
            gs.get_communicator().barrier()
            signal.pause()
    if __name__ == "__main__":
        rank, port = map(int, sys.argv[1:3])
        gs.launcher(work, n_gpus=1, world_size=2, rank_start=rank, port=port, backend="shm")(sys.argv[3])
"""


@pytest.mark.parametrize("has_old_file", [False, True])
def test_a_failure_on_one_machine_ends_the_ranks_of_the_other(tmp_path, has_old_file):
    script, port = command.write_script(tmp_path, NODE), str(gs.free_port())
    if has_old_file:  # of a launcher that was killed
        publish(secret_path(f"127.0.0.1:{port}"), Endpoint(f"127.0.0.1:{port}", b"s" * 32))
    with contextlib.ExitStack() as stack:
        nodes = [
            stack.enter_context(
                command.Launcher([sys.executable, script, number, port, role], stderr=subprocess.PIPE, text=True)
            )
            for number, role in (("0", "wait"), ("1", "fail"))
        ]
        errors = [node.communicate(timeout=60)[1] for node in nodes]
    assert [node.returncode for node in nodes] == [1, 1]
    assert errors[1].endswith("ValueError: boom\n")
    assert "gradsync.errors.RankFailed: rank 0 (pid " in errors[0]
    assert "ValueError: boom" in errors[0]
    assert not list(tmp_path.glob("*.secret*"))
