"""Launchers and ranks that meet over TLS, because the environment names certificates."""

import os
import re

import command
import pytest
from certificates import Authority
from node_commands import Nodes

import gradsync as gs

MEETING = """
import gradsync as gs, numpy, sys
with gs.init_process_group("shm") as comm:
    print(comm.all_reduce(numpy.ones(1)), "OpenSSL" if "ssl" in sys.modules else "no OpenSSL")
"""


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path / "ca")


def variables(authority):
    return os.environ | authority.certificate() | authority.trusted


@pytest.mark.parametrize("is_tls", [False, True])
def test_ranks_of_one_machine_load_openssl_only_where_they_need_it(tmp_path, authority, is_tls):
    script = command.write_script(tmp_path, MEETING)
    env = variables(authority) if is_tls else os.environ
    code, out, err = command.run("run", "-n", 2, script, env=env)
    loaded = "OpenSSL" if is_tls else "no OpenSSL"
    assert (code, sorted(out.splitlines()), err) == (0, [f"[rank {rank}] [2.] {loaded}" for rank in range(2)], "")


def test_launchers_with_certificates_of_their_own_meet(tmp_path, authority, monkeypatch):
    with Nodes(tmp_path, f"127.0.0.1:{gs.free_port()}", 2) as run:
        for node in range(2):
            for name, value in (authority.certificate() | authority.trusted).items():
                monkeypatch.setenv(name, value)
            run.processes[node] = command.start(*line_of(run, node), env=os.environ)
        assert [code for code, _ in run.end_all()] == [0, 0]


def test_a_launcher_of_another_ca_is_turned_away(tmp_path, authority):
    with Nodes(tmp_path, f"127.0.0.1:{gs.free_port()}", 2) as run:
        run.processes[0] = command.start(*line_of(run, 0), env=variables(authority))
        foreign = variables(Authority(tmp_path / "other"))
        run.processes[1] = command.start(*line_of(run, 1), env=foreign)
        code, err = run.end(1)
        assert code == 1
        assert "the TLS certificate of the server does not hold" in err
        assert "Traceback" not in err


def line_of(run, node):
    place = ("--nnodes", 2, "--node-rank", node, "--rendezvous", run.rendezvous, "--secret-file", run.secret)
    return ("run", "-n", 1, *place, run.script, "meet")


def test_files_that_do_not_fit_are_told_before_ranks_start(tmp_path, authority):
    script = command.write_script(tmp_path, "print('started')")
    env = os.environ | authority.certificate() | {"GRADSYNC_TLS_KEY": "missing.pem"}
    for line in (
        ("run", "-n", 2, script),
        ("serve", "--world-size", 2, "--secret-file", Nodes(tmp_path, "", 1).secret),
    ):
        code, out, err = command.run(*line, env=env)
        assert (code, out) == (2, "")
        assert re.fullmatch(r"gradsync: error: GRADSYNC_TLS_KEY='missing.pem' cannot be opened: No such file.*\n", err)
