"""Who this process is, and what is set for it: from dicts of variables, without starting anything."""

import logging
import os
import pickle

import pytest

from gradsync import environment
from gradsync.environment import RankEnvironment, read_environment, variables_of_mpi
from gradsync.errors import InvalidArgument

SECRET = "5a" * 32


@pytest.fixture(autouse=True)
def forget_secret(monkeypatch):
    monkeypatch.setattr(environment, "_secret", None)


def place(environ):
    found = read_environment(dict(environ))
    return found.rank, found.world_size, found.local_rank, found.local_world_size, found.source


OURS = {
    "GRADSYNC_RANK": "3",
    "GRADSYNC_WORLD_SIZE": "4",
    "GRADSYNC_LOCAL_RANK": "1",
    "GRADSYNC_LOCAL_WORLD_SIZE": "2",
}
TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "6",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "3",
}
PMI = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
SLURM = {
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "7",
    "SLURM_NTASKS": "64",
    "SLURM_STEP_NUM_TASKS": "9",
    "SLURM_LOCALID": "3",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2),1",
}


def test_nothing_set():
    assert read_environment({}) is None
    assert read_environment({"RANK": "", "WORLD_SIZE": " ", "MASTER_ADDR": "node0"}) is None


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (OURS, (3, 4, 1, 2, "gradsync")),
        (TORCHRUN, (5, 8, 1, 4, "RANK")),
        (OPEN_MPI, (2, 6, 2, 3, "Open MPI")),
        (PMI, (1, 2, 0, 1, "PMI")),
        (SLURM, (7, 9, 3, 4, "Slurm")),
        (SLURM | {"SLURM_PROCID": "8", "SLURM_LOCALID": "0", "SLURM_NODEID": "2"}, (8, 9, 0, 1, "Slurm")),
        ({"RANK": "1", "WORLD_SIZE": "2"}, (1, 2, 1, 2, "RANK")),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, (1, 2, 0, 2, "RANK")),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, (0, 2, 0, 2, "PMI")),
        ({"SLURM_STEPID": "4", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, (1, 2, 1, 2, "Slurm")),
        ({"RANK": " 1 ", "WORLD_SIZE": "2"}, (1, 2, 1, 2, "RANK")),
    ],
)
def test_each_launcher(environ, expected):
    assert place(environ) == expected


def test_precedence_among_those_that_agree():
    environ = {
        **{"GRADSYNC_RANK": "1", "GRADSYNC_WORLD_SIZE": "2"},
        **{"RANK": "1", "WORLD_SIZE": "2"},
        **{"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
        **{"PMI_RANK": "1", "PMI_SIZE": "2"},
        **{"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"},
    }
    order = []
    for prefix in ("GRADSYNC_", ("RANK", "WORLD"), "OMPI_", "PMI_", "SLURM_"):
        order.append(place(environ)[-1])
        environ = {name: text for name, text in environ.items() if not name.startswith(prefix)}
    assert order == ["gradsync", "RANK", "Open MPI", "PMI", "Slurm"]
    assert read_environment(environ) is None


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        # mpiexec -n 6 sh -c 'RANK=$OMPI_COMM_WORLD_RANK WORLD_SIZE=$OMPI_COMM_WORLD_SIZE python script.py'
        (OPEN_MPI | {"RANK": "2", "WORLD_SIZE": "6"}, (2, 6, 2, 3, "RANK")),
        # The same, with a GPU chosen by the script.
        (OPEN_MPI | {"RANK": "2", "WORLD_SIZE": "6", "LOCAL_RANK": "0"}, (2, 6, 0, 6, "RANK")),
        # srun --mpi=pmi2
        (SLURM | {"PMI_RANK": "7", "PMI_SIZE": "9"}, (7, 9, 3, 4, "PMI")),
        # Cray's launcher
        ({"PMI_RANK": "7", "PMI_SIZE": "9", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "4"}, (7, 9, 1, 4, "PMI")),
    ],
)
def test_what_one_launcher_does_not_tell_of_the_machine_another_does(environ, expected):
    assert place(environ) == expected


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        # mpiexec in a batch job starts its daemons by srun, one on each machine; torchrun in a step likewise.
        (SLURM | PMI, (1, 2, 0, 1, "PMI")),
        (SLURM | TORCHRUN, (5, 8, 1, 4, "RANK")),
        (SLURM | OURS, (3, 4, 1, 2, "gradsync")),
        (SLURM | {"SLURM_PROCID": "12"} | {"PMI_RANK": "0", "PMI_SIZE": "2"}, (0, 2, 0, 2, "PMI")),
    ],
)
def test_slurms_variables_are_inherited_and_contradict_nobody(environ, expected):
    assert place(environ) == expected


def test_torchrun_started_by_mpiexec_on_each_machine():
    agents = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "7"}
    groups = {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "2"}
    assert place(TORCHRUN | agents | groups) == (5, 8, 1, 4, "RANK")
    for other in ({}, {"GROUP_WORLD_SIZE": "1"}):
        with pytest.raises(InvalidArgument, match="different ranks"):
            place(TORCHRUN | agents | other)


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        # torchrun, started by a rank of gradsync
        (
            OURS | TORCHRUN | {"GRADSYNC_ADDRESS": "127.0.0.1:1", "GRADSYNC_HOSTED": "1"},
            r"GRADSYNC_RANK=3 GRADSYNC_WORLD_SIZE=4 and RANK=5 WORLD_SIZE=8 name different ranks.*"
            r"unset GRADSYNC_RANK GRADSYNC_WORLD_SIZE .*GRADSYNC_ADDRESS GRADSYNC_HOSTED\nor\n  unset RANK WORLD_SIZE",
        ),
        # mpiexec in a pod whose operator has set RANK
        (
            OPEN_MPI | {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "pod-0", "MASTER_PORT": "23456"},
            r"RANK=0 WORLD_SIZE=1 and OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=6 name different.*"
            r"unset RANK WORLD_SIZE MASTER_ADDR MASTER_PORT\nor\n  unset OMPI_COMM_WORLD_RANK",
        ),
        ({"RANK": "0", "WORLD_SIZE": "2"} | PMI, "RANK=0 WORLD_SIZE=2 and PMI_RANK=1 PMI_SIZE=2 name different"),
        ({"RANK": "1", "WORLD_SIZE": "4"} | PMI, "RANK=1 WORLD_SIZE=4 and PMI_RANK=1 PMI_SIZE=2 name different"),
        (OURS | PMI, "GRADSYNC_RANK=3 GRADSYNC_WORLD_SIZE=4 and PMI_RANK=1 PMI_SIZE=2 name different"),
        (OPEN_MPI | PMI, "OMPI_COMM_WORLD_SIZE=6 and PMI_RANK=1 PMI_SIZE=2 name different"),
    ],
)
def test_contradictions_are_told(environ, text):
    with pytest.raises(InvalidArgument, match=f"(?s){text}"):
        read_environment(environ)


def test_variables_of_mpi():
    environ = OPEN_MPI | PMI | TORCHRUN | SLURM | {"PMIX_RANK": "0", "PMI_FD": "9", "HYDI_CONTROL_FD": "7"}
    assert variables_of_mpi(environ) == {*OPEN_MPI, *PMI, "PMIX_RANK", "PMI_FD", "HYDI_CONTROL_FD"}


def test_command_in_a_slurm_batch_script_is_no_rank():
    batch = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"}
    assert read_environment(batch) is None
    for special in ("4294967291", "4294967290"):  # the batch script, and the shell that salloc gives
        assert read_environment(batch | {"SLURM_STEP_ID": special}) is None


def master(environ):
    found = read_environment(environ)
    return found.master_addr, found.master_port, found.run_name


def test_slurm_tells_where_to_meet():
    here = SLURM | {"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}
    here |= {"SLURM_LOCALID": "1", "SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": "2"}
    assert master(here) == (None, None, "slurm-4711.0.0")
    assert master(here | {"SLURM_RESTART_COUNT": "3"}) == (None, None, "slurm-4711.0.3")
    assert master(here | {"MASTER_ADDR": "n", "MASTER_PORT": "9"}) == ("127.0.0.1", 9, None)
    assert master(here | {"GRADSYNC_ADDRESS": "n:9"}) == (None, None, None)
    several = SLURM | {"SLURM_JOB_ID": "4711", "SLURM_STEP_NODELIST": "gpu[07-09]", "SLURM_JOB_NODELIST": "gpu[01-09]"}
    host, port, name = master(several)
    assert (host, name) == ("gpu07", None)
    assert 15_000 <= port < 30_000
    assert master(several | {"MASTER_ADDR": "n"}) == ("n", port, None)
    assert master(several | {"MASTER_ADDR": "n", "MASTER_PORT": "9"}) == ("n", 9, None)
    assert master(several | {"MASTER_PORT": "9"}) == ("gpu07", 9, None)
    assert master(several | {"SLURM_STEP_ID": "1"})[1] != port
    assert master(several | {"SLURM_PROCID": "6", "SLURM_LOCALID": "2"})[:2] == (host, port)


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("login", "login"),
        ("a1,b2", "a1"),
        ("gpu[3,7-9],login", "gpu3"),
        ("gpu[007-012]", "gpu007"),
        ("rack[1-2]node[03-04,7],login", "rack1node03"),
        ("rack[1,3]-ib,login", "rack1-ib"),
    ],
)
def test_first_host_of_a_list(hosts, first):
    assert master(SLURM | {"SLURM_JOB_NODELIST": hosts})[0] == first


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"WORLD_SIZE": None}, "RANK='5' is set, but WORLD_SIZE is not"),
        ({"RANK": None}, "WORLD_SIZE='8' is set, but RANK is not"),
        ({"RANK": "x"}, r"RANK needs to be an integer from 0 to 7 \(WORLD_SIZE - 1\), got 'x'"),
        ({"RANK": "1.0"}, "RANK needs to be an integer from 0 to 7 .*, got '1.0'"),
        ({"RANK": "9" * 5000}, "RANK needs to be an integer"),
        ({"RANK": "٣"}, "RANK needs to be an integer"),
        ({"RANK": "8"}, r"RANK needs to be an integer from 0 to 7 \(WORLD_SIZE - 1\), got '8'"),
        ({"RANK": "-1"}, r"RANK needs to be an integer from 0 to 7 \(WORLD_SIZE - 1\), got '-1'"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE needs to be an integer from 1 to 1000000000, got '0'"),
        ({"LOCAL_RANK": "4"}, r"LOCAL_RANK needs to be an integer from 0 to 3 \(LOCAL_WORLD_SIZE - 1\), got '4'"),
        ({"LOCAL_RANK": "8", "LOCAL_WORLD_SIZE": None}, "LOCAL_RANK needs to be an integer from 0 to 7, got '8'"),
        ({"LOCAL_WORLD_SIZE": "9"}, r"LOCAL_WORLD_SIZE needs to be an integer from 1 to 8 \(WORLD_SIZE\), got '9'"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT needs to be an integer from 1 to 65535, got '65536'"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT needs to be an integer from 1 to 65535, got 'http'"),
        ({"GRADSYNC_ADDRESS": "node0"}, "GRADSYNC_ADDRESS: an address needs the form host:port"),
    ],
)
def test_malformed_values_are_named(change, text):
    environ = {name: value for name, value in (TORCHRUN | change).items() if value is not None}
    with pytest.raises(InvalidArgument, match=text):
        read_environment(environ)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"SLURM_STEP_TASKS_PER_NODE": "4(2)"}, r"needs to be a list such as 4\(x2\),1, got '4\(2\)'"),
        ({"SLURM_NODEID": "3"}, "SLURM_NODEID=3 has no entry"),
        ({"SLURM_LOCALID": "4"}, "SLURM_LOCALID needs to be an integer from 0 to 3, got '4'"),
        (
            {"SLURM_STEP_NUM_TASKS": "7"},
            r"SLURM_PROCID needs to be an integer from 0 to 6 \(SLURM_STEP_NUM_TASKS - 1\), got '7'",
        ),
    ],
)
def test_malformed_slurm_values_are_named(change, text):
    with pytest.raises(InvalidArgument, match=text):
        read_environment(SLURM | change)


def test_everything_else():
    environ = OURS | {
        "GRADSYNC_ADDRESS": "127.0.0.1:4000",
        "GRADSYNC_SECRET": SECRET,
        "GRADSYNC_HOSTED": "1",
        "GRADSYNC_BACKEND": "shm",
        "MASTER_ADDR": "node0",
        "MASTER_PORT": "29500",
    }
    expected = RankEnvironment(3, 4, 1, 2, "127.0.0.1:4000", bytes.fromhex(SECRET), True, "node0", 29500, "gradsync")
    assert read_environment(environ) == expected
    assert "GRADSYNC_SECRET" not in environ
    assert "secret" not in repr(expected)
    assert SECRET not in repr(expected)
    assert repr(b"Z") not in repr(expected)
    assert pickle.loads(pickle.dumps(expected)) == expected


def test_defaults():
    found = read_environment({"RANK": "0", "WORLD_SIZE": "1"})
    assert (found.address, found.secret, found.hosted) == (None, None, False)
    assert (found.master_addr, found.master_port) == (None, None)


def test_secret_leaves_the_environment_and_is_kept(monkeypatch):
    monkeypatch.setenv("GRADSYNC_SECRET", SECRET)
    assert environment.take_secret() == bytes.fromhex(SECRET)
    assert "GRADSYNC_SECRET" not in os.environ
    assert environment.take_secret() == bytes.fromhex(SECRET)
    assert environment.take_secret({}) is None


def test_held_secret_is_given(monkeypatch):
    monkeypatch.delenv("GRADSYNC_SECRET", raising=False)
    monkeypatch.delenv("GRADSYNC_SECRET_FILE", raising=False)
    assert environment.take_secret() is None
    environment.hold_secret(b"x" * 32)
    assert environment.take_secret() == b"x" * 32


def test_secret_file_comes_second(tmp_path):
    path = tmp_path / "secret"
    path.write_text(SECRET + "\n")
    path.chmod(0o600)
    assert environment.take_secret({"GRADSYNC_SECRET_FILE": str(path)}) == bytes.fromhex(SECRET)
    both = {"GRADSYNC_SECRET_FILE": str(path), "GRADSYNC_SECRET": "ab" * 16}
    assert environment.take_secret(both) == b"\xab" * 16


@pytest.mark.parametrize("text", ["", "abc", "zz" * 32, "ab" * 15])
def test_malformed_secret_is_not_quoted(text):
    with pytest.raises(InvalidArgument, match="GRADSYNC_SECRET needs to contain a secret") as caught:
        environment.take_secret({"GRADSYNC_SECRET": text})
    assert not text or text not in str(caught.value)


# What each variable reads, and what it refuses.
READ = {
    "GRADSYNC_RANK": ([("3", 3)], None, ["x", "-1", "1.5", "9" * 30]),
    "GRADSYNC_WORLD_SIZE": ([("3", 3)], None, ["0", "x"]),
    "GRADSYNC_LOCAL_RANK": ([("0", 0)], None, ["x"]),
    "GRADSYNC_LOCAL_WORLD_SIZE": ([("1", 1)], None, ["0"]),
    "GRADSYNC_ADDRESS": ([("node0:1", "node0:1")], None, ["node0"]),
    "GRADSYNC_HOSTED": ([("1", True), ("0", False)], False, ["true", "yes"]),
    "GRADSYNC_BACKEND": ([("shm", "shm"), (" mpi ", "mpi")], "auto", ["loco", "SHM"]),
    "GRADSYNC_ALLOW_SHARED_GPU": ([("1", True), (" 1 ", True), ("0", False)], False, ["true", "2"]),
    "GRADSYNC_SECRET": ([(SECRET, bytes.fromhex(SECRET))], None, ["abc", "ab" * 15]),
    "GRADSYNC_SECRET_FILE": ([], None, ["/nowhere/secret", "/dev/null"]),
    "GRADSYNC_COLLECTIVE_TIMEOUT_SECONDS": ([("3600", 3600.0), ("0.5", 0.5)], None, ["0", "-1", "nan", "inf", "soon"]),
    "GRADSYNC_LOG": ([("info", "INFO"), ("Debug", "DEBUG")], None, ["loud"]),
    "GRADSYNC_FLIGHT_RECORDER_ENTRIES": ([("1", 1), ("1000000", 10**6)], 64, ["0", "1000001", "many", "1_0", "٣"]),
    "GRADSYNC_TRACE": ([("/t", "/t")], None, []),
}


def test_the_table_has_every_variable():
    assert [str(variable) for variable in environment.VARIABLES] == list(READ)


@pytest.mark.parametrize("variable", environment.VARIABLES)
def test_a_variable_is_read_or_refused_by_name(variable):
    accepted, default, refused = READ[variable]
    for text, value in accepted:
        assert variable.read({str(variable): text}) == value
        assert not list(environment.refused_variables({str(variable): text}))
    for environ in ({}, {str(variable): ""}, {str(variable): " "}):
        assert variable.read(environ) == default
    for text in refused:
        with pytest.raises(InvalidArgument) as caught:
            variable.read({str(variable): text})
        assert variable in str(caught.value) or text in str(caught.value)
        assert [name for name, _ in environment.refused_variables({str(variable): text})] == [variable]


def test_a_name_that_travels_is_text():
    assert type(pickle.loads(pickle.dumps(environment.RANK))) is str


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("GRADSYNC_TIMOUT", "GRADSYNC_COLLECTIVE_TIMEOUT_SECONDS"),
        ("GRADSYNC_TIMEOUT", "GRADSYNC_COLLECTIVE_TIMEOUT_SECONDS"),
        ("GRADSYNC_BACKED", "GRADSYNC_BACKEND"),
        ("GRADSYNC_SECRETFILE", "GRADSYNC_SECRET_FILE"),
        ("GRADSYNC_TRACE_DIR", "GRADSYNC_TRACE"),
        ("GRADSYNC_RECORDER_ENTRIES", "GRADSYNC_FLIGHT_RECORDER_ENTRIES"),
        ("GRADSYNC_", None),
        ("GRADSYNC_HEARTBEAT", None),
    ],
)
def test_the_variable_that_was_meant_is_found(name, meant):
    assert environment.unknown_variables({name: "1", "GRADSYNC_RANK": "0", "PATH": "/bin"}) == {name: meant}


def test_each_unknown_one_is_told_once_in_a_process(caplog, monkeypatch):
    monkeypatch.setattr(environment, "_warned", set())
    environ = {"GRADSYNC_BACKED": "shm", "GRADSYNC_BACKEND": "shm", "GRADSYNC_TEST_X": "1", "PATH": "/bin"}
    with caplog.at_level(logging.WARNING, logger="gradsync"):
        for _ in range(2):
            environment.warn_of_unknown_variables(environ)
        environment.warn_of_unknown_variables(environ | {"GRADSYNC_VERBOSE": "1"})
    assert [record.getMessage().split(": ")[2] for record in caplog.records] == ["GRADSYNC_BACKED", "GRADSYNC_VERBOSE"]


@pytest.fixture
def logger():
    found = logging.getLogger("gradsync")
    level, handlers = found.level, found.handlers[:]
    found.handlers[:] = []
    yield found
    found.setLevel(level)
    found.handlers[:] = handlers


def test_logging(logger, capsys):
    environment.configure_logging({})
    assert not logger.handlers
    environment.configure_logging({"GRADSYNC_LOG": "info"})
    environment.configure_logging({"GRADSYNC_LOG": "info"})
    logger.info("taking shm")
    logger.debug("unseen")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].endswith("gradsync INFO: taking shm")


def test_a_rank_that_looks_for_removed_variables_opens_no_secret_file(monkeypatch, tmp_path):
    monkeypatch.setattr(environment, "read_secret_file", lambda path: pytest.fail("opened"))
    environment.check_removed_variables({"GRADSYNC_SECRET_FILE": str(tmp_path / "secret")})
    environment.check_variables({"GRADSYNC_SECRET_FILE": str(tmp_path / "secret")})
    monkeypatch.setitem(environment.REMOVED["gradsync (variables)"], "GRADSYNC_OLD", "use the new one")
    environment.check_variables({"GRADSYNC_OLD": ""})
    with pytest.raises(InvalidArgument, match="no GRADSYNC_OLD any more .*: use the new one"):
        environment.check_variables({"GRADSYNC_OLD": "1"})
