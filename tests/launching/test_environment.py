"""Variables: who this process is, by each launcher's, and what gradsync's own say.

Which rank they name is asked of a private function, in `place`: to see it from outside, all ranks would have to run.
"""

import os
import pickle

import pytest

import gradsync as gs
from gradsync import environment

SECRET = "5a" * 32


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch):
    prefixes = (
        "GRADSYNC_",
        "SLURM_",
        "OMPI_",
        "PMI",
        "MPI_",
        "TORCHELASTIC_",
        "GROUP_",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_",
    )
    for name in list(os.environ):
        if name.startswith((*prefixes, "MASTER_")):
            monkeypatch.delenv(name)


def place(variables):
    found = environment.read_environment(dict(variables))
    return found.rank, found.world_size, found.local_rank, found.local_world_size, found.source


def refusal(variables, monkeypatch):
    """What the variables are refused with, where a user meets it."""
    with monkeypatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        with pytest.raises(gs.InvalidArgument) as caught:
            gs.init_process_group("shm")
        return str(caught.value)


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
RANK_1 = {"RANK": "1", "WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (OURS, (3, 4, 1, 2, "gradsync")),
        (TORCHRUN, (5, 8, 1, 4, "RANK")),
        (OPEN_MPI, (2, 6, 2, 3, "Open MPI")),
        (PMI, (1, 2, 0, 1, "PMI")),
        (SLURM, (7, 9, 3, 4, "Slurm")),
        (SLURM | {"SLURM_PROCID": "8", "SLURM_LOCALID": "0", "SLURM_NODEID": "2"}, (8, 9, 0, 1, "Slurm")),
        (RANK_1, (1, 2, 1, 2, "RANK")),
        (RANK_1 | {"LOCAL_RANK": "0"}, (1, 2, 0, 2, "RANK")),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, (0, 2, 0, 2, "PMI")),
        ({"SLURM_STEPID": "4", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, (1, 2, 1, 2, "Slurm")),
        ({"RANK": " 1 ", "WORLD_SIZE": "2"}, (1, 2, 1, 2, "RANK")),
        # What one launcher does not tell of the machine another does: mpiexec -n 6 sh -c 'RANK=... python script.py',
        # the same with a GPU chosen by the script, srun --mpi=pmi2, and Cray's launcher.
        (OPEN_MPI | {"RANK": "2", "WORLD_SIZE": "6"}, (2, 6, 2, 3, "RANK")),
        (OPEN_MPI | {"RANK": "2", "WORLD_SIZE": "6", "LOCAL_RANK": "0"}, (2, 6, 0, 6, "RANK")),
        (SLURM | {"PMI_RANK": "7", "PMI_SIZE": "9"}, (7, 9, 3, 4, "PMI")),
        ({"PMI_RANK": "7", "PMI_SIZE": "9", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "4"}, (7, 9, 1, 4, "PMI")),
        # Slurm's are inherited and contradict nobody: mpiexec in a batch job starts its daemons by srun, one on each
        # machine; torchrun in a step likewise.
        (SLURM | PMI, (1, 2, 0, 1, "PMI")),
        (SLURM | TORCHRUN, (5, 8, 1, 4, "RANK")),
        (SLURM | OURS, (3, 4, 1, 2, "gradsync")),
        (SLURM | {"SLURM_PROCID": "12", "PMI_RANK": "0", "PMI_SIZE": "2"}, (0, 2, 0, 2, "PMI")),
        # torchrun, started by mpiexec on each machine
        (
            TORCHRUN
            | {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "7"}
            | {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "2"},
            (5, 8, 1, 4, "RANK"),
        ),
    ],
)
def test_each_launcher_names_the_rank(variables, expected, monkeypatch):
    assert place(variables) == expected
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert gs.is_launched()


def test_of_several_that_agree_the_innermost_counts():
    variables = {
        **{"GRADSYNC_RANK": "1", "GRADSYNC_WORLD_SIZE": "2"},
        **{"RANK": "1", "WORLD_SIZE": "2"},
        **{"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
        **{"PMI_RANK": "1", "PMI_SIZE": "2"},
        **{"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"},
    }
    order = []
    for prefix in ("GRADSYNC_", ("RANK", "WORLD"), "OMPI_", "PMI_", "SLURM_"):
        order.append(place(variables)[-1])
        variables = {name: text for name, text in variables.items() if not name.startswith(prefix)}
    assert order == ["gradsync", "RANK", "Open MPI", "PMI", "Slurm"]


BATCH = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"}


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"RANK": "", "WORLD_SIZE": " ", "MASTER_ADDR": "node0"},
        BATCH,  # a command in a batch script
        BATCH | {"SLURM_STEP_ID": "4294967291"},  # the batch script
        BATCH | {"SLURM_STEP_ID": "4294967290"},  # the shell that salloc gives
    ],
)
def test_a_process_that_no_launcher_has_started_is_no_rank(variables, monkeypatch):
    assert environment.read_environment(variables) is None
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert not gs.is_launched()


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        # torchrun, started by a rank of gradsync
        (
            OURS | TORCHRUN | {"GRADSYNC_ADDRESS": "127.0.0.1:1", "GRADSYNC_HOSTED": "1"},
            ("GRADSYNC_RANK=3", "RANK=5", "unset GRADSYNC_RANK", "GRADSYNC_ADDRESS GRADSYNC_HOSTED\n", "unset RANK"),
        ),
        # mpiexec in a pod whose operator has set RANK
        (
            OPEN_MPI | {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "pod-0", "MASTER_PORT": "23456"},
            ("RANK=0", "OMPI_COMM_WORLD_RANK=2", "unset RANK WORLD_SIZE MASTER_ADDR MASTER_PORT\n", "unset OMPI_"),
        ),
        ({"RANK": "0", "WORLD_SIZE": "2"} | PMI, ("RANK=0", "PMI_RANK=1")),
        ({"RANK": "1", "WORLD_SIZE": "4"} | PMI, ("WORLD_SIZE=4", "PMI_SIZE=2")),
        (OURS | PMI, ("GRADSYNC_RANK=3", "PMI_RANK=1")),
        (OPEN_MPI | PMI, ("OMPI_COMM_WORLD_SIZE=6", "PMI_SIZE=2")),
        # torchrun, started by mpiexec, that knows nothing of other machines
        (TORCHRUN | {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "1"}, ("RANK=5",)),
    ],
)
def test_two_launchers_that_disagree_are_told_with_what_to_unset(variables, words, monkeypatch):
    text = refusal(variables, monkeypatch)
    assert all(word in text for word in words), text


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"WORLD_SIZE": None}, "WORLD_SIZE is not"),
        ({"RANK": None}, "RANK is not"),
        ({"RANK": "x"}, "RANK needs"),
        ({"RANK": "1.0"}, "RANK needs"),
        ({"RANK": "9" * 5000}, "RANK needs"),
        ({"RANK": "٣"}, "RANK needs"),
        ({"RANK": "8"}, "RANK needs"),
        ({"RANK": "-1"}, "RANK needs"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE needs"),
        ({"LOCAL_RANK": "4"}, "LOCAL_RANK needs"),
        ({"LOCAL_RANK": "8", "LOCAL_WORLD_SIZE": None}, "LOCAL_RANK needs"),
        ({"LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE needs"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT needs"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT needs"),
        ({"GRADSYNC_ADDRESS": "node0"}, "GRADSYNC_ADDRESS"),
    ],
)
def test_a_malformed_value_is_named(change, word, monkeypatch):
    variables = {name: value for name, value in (TORCHRUN | change).items() if value is not None}
    assert word in refusal(variables, monkeypatch)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"SLURM_STEP_TASKS_PER_NODE": "4(2)"}, "4(2)"),
        ({"SLURM_NODEID": "3"}, "SLURM_NODEID=3"),
        ({"SLURM_LOCALID": "4"}, "SLURM_LOCALID needs"),
        ({"SLURM_STEP_NUM_TASKS": "7"}, "SLURM_PROCID needs"),
    ],
)
def test_a_malformed_value_of_slurm_is_named(change, word, monkeypatch):
    assert word in refusal(SLURM | change, monkeypatch)


# -- Where ranks of Slurm meet: private too, as it takes a cluster -----------------------------------------------------


def master(variables):
    found = environment.read_environment(dict(variables))
    return found.master_addr, found.master_port, found.run_name


def test_slurm_tells_where_to_meet():
    here = SLURM | {"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}
    here |= {"SLURM_LOCALID": "1", "SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": "2"}
    names = [master(here | change)[2] for change in ({}, {"SLURM_RESTART_COUNT": "3"}, {"SLURM_STEP_ID": "1"})]
    assert len(set(names)) == 3
    assert None not in names
    assert master(here)[:2] == (None, None)
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
def test_the_first_host_of_slurms_list_is_found(hosts, first):
    assert master(SLURM | {"SLURM_JOB_NODELIST": hosts})[0] == first


# -- gradsync's own variables ------------------------------------------------------------------------------------------

# What each reads, its default, and what it refuses.
READ = {
    "GRADSYNC_RANK": ([("3", 3)], None, ["x", "-1", "1.5", "9" * 30]),
    "GRADSYNC_WORLD_SIZE": ([("3", 3)], None, ["0", "x"]),
    "GRADSYNC_LOCAL_RANK": ([("0", 0)], None, ["x"]),
    "GRADSYNC_LOCAL_WORLD_SIZE": ([("1", 1)], None, ["0"]),
    "GRADSYNC_ADDRESS": ([("node0:1", "node0:1")], None, ["node0"]),
    "GRADSYNC_HOSTED": ([("1", True), ("0", False)], False, ["true", "yes"]),
    "GRADSYNC_BACKEND": ([("shm", "shm"), (" mpi ", "mpi")], "auto", ["loco", "SHM"]),
    "GRADSYNC_ALLOW_SHARED_GPU": ([("1", True), (" 1 ", True), ("0", False)], False, ["true", "2"]),
    "GRADSYNC_SECRET": ([(SECRET, bytes.fromhex(SECRET))], None, ["abc", "ab" * 15, "zz" * 32]),
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
    for variables in ({}, {str(variable): ""}, {str(variable): " "}):
        assert variable.read(variables) == default
    for text in refused:
        with pytest.raises(gs.InvalidArgument) as caught:
            variable.read({str(variable): text})
        assert variable in str(caught.value) or text in str(caught.value)
        assert [name for name, _ in environment.refused_variables({str(variable): text})] == [variable]
    if variable == "GRADSYNC_SECRET":  # a secret is never shown
        assert text not in str(caught.value)


def test_a_rank_keeps_its_secret_and_shows_it_nowhere(monkeypatch, tmp_path):
    """It leaves the environment; a file comes second."""
    monkeypatch.setenv("GRADSYNC_SECRET", SECRET)
    assert environment.take_secret() == environment.take_secret() == bytes.fromhex(SECRET)
    assert "GRADSYNC_SECRET" not in os.environ
    assert environment.take_secret({}) is None
    (tmp_path / "secret").write_text("ab" * 16 + "\n")
    (tmp_path / "secret").chmod(0o600)
    of_file = {"GRADSYNC_SECRET_FILE": str(tmp_path / "secret")}
    assert environment.take_secret(dict(of_file)) == b"\xab" * 16
    assert environment.take_secret(of_file | {"GRADSYNC_SECRET": SECRET}) == bytes.fromhex(SECRET)
    found = environment.read_environment(OURS | {"GRADSYNC_SECRET": SECRET})
    assert found.secret == bytes.fromhex(SECRET)
    assert not [word for word in ("secret", SECRET, repr(b"Z")) if word in repr(found)]
    assert pickle.loads(pickle.dumps(found)) == found


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
    """End to end in test_run; here the spellings."""
    assert environment.unknown_variables({name: "1", "GRADSYNC_RANK": "0", "PATH": "/bin"}) == {name: meant}


def test_gradsync_log_sets_the_level_and_logs_once(cli, script):
    path = script(
        """
        import logging
        import gradsync as gs
        for _ in range(2):
            with gs.init_process_group("local"):
                pass
        logging.getLogger("gradsync").info("seen")
        logging.getLogger("gradsync").debug("unseen")
        """
    )
    done = cli.python(path, environment={"GRADSYNC_LOG": "info"})
    assert [line.rpartition(": ")[2] for line in done.err.splitlines() if "seen" in line] == ["seen"], done
    assert "seen" not in cli.python(path, environment={"GRADSYNC_LOG": None}).err
