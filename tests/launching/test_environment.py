"""Variables: who this process is, by each launcher's, and what gradsync's own say.

Which rank they name, and where Slurm's ranks meet, is asked of a private function, in `found`: to see it from outside,
all ranks would have to run, on a cluster.
"""

import os

import pytest

import gradsync as gs
from gradsync import launchers


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


def found(variables):
    return launchers.read_environment(variables)


def identity(variables):
    it = found(variables)
    return it.rank, it.world_size, it.local_rank, it.local_world_size, it.source


def refusal(variables, monkeypatch):
    """What the variables are refused with, where a user meets it."""
    with monkeypatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        with pytest.raises(gs.InvalidArgument) as caught:
            gs.init_process_group("shm")
        return str(caught.value)


OURS = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "gradsync-7"}
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


@pytest.mark.parametrize(
    ("variables", "expected"),
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
        # What one launcher does not say of the machine another does: mpiexec -n 6 sh -c 'RANK=... python script.py',
        # the same with a GPU chosen by the script, srun --mpi=pmi2, and Cray's launcher.
        (OPEN_MPI | {"RANK": "2", "WORLD_SIZE": "6"}, (2, 6, 2, 3, "RANK")),
        (OPEN_MPI | {"RANK": "2", "WORLD_SIZE": "6", "LOCAL_RANK": "0"}, (2, 6, 0, 6, "RANK")),
        (SLURM | {"PMI_RANK": "7", "PMI_SIZE": "9"}, (7, 9, 3, 4, "PMI")),
        ({"PMI_RANK": "7", "PMI_SIZE": "9", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "4"}, (7, 9, 1, 4, "PMI")),
        # Slurm's are inherited and contradict nobody: mpiexec in a batch job starts its daemons by srun, one on each
        # machine; torchrun in a step likewise.
        (SLURM | PMI, (1, 2, 0, 1, "PMI")),
        (SLURM | TORCHRUN | {"TORCHELASTIC_RUN_ID": "none"}, (5, 8, 1, 4, "RANK")),
        (SLURM | TORCHRUN | {"WORLD_SIZE": "9"}, (5, 9, 1, 4, "RANK")),  # each task starts some by hand
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
    assert identity(variables) == expected
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert gs.is_launched()


def test_of_several_that_agree_the_innermost_counts():
    variables = {
        **{"RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "gradsync-7"},
        **{"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
        **{"PMI_RANK": "1", "PMI_SIZE": "2"},
        **{"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"},
    }
    order = []
    for prefix in ("TORCHELASTIC_", ("RANK", "WORLD"), "OMPI_", "PMI_", "SLURM_"):
        order.append(found(variables).source)
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
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert not gs.is_launched()


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        # mpiexec, started by a rank of gradsync
        (
            OURS | PMI | {"GRADSYNC_ADDRESS": "127.0.0.1:1", "GRADSYNC_SECRET_FILE": "fd:5"},
            ("RANK=3", "PMI_RANK=1", "unset RANK", "GRADSYNC_ADDRESS GRADSYNC_SECRET_FILE", "unset PMI_RANK"),
        ),
        # srun in a job whose script has set RANK
        (SLURM | {"RANK": "0", "WORLD_SIZE": "1"}, ("RANK=0", "SLURM_PROCID=7", "unset RANK WORLD_SIZE\n")),
        # mpiexec in a pod whose operator has set RANK
        (
            OPEN_MPI | {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "pod-0", "MASTER_PORT": "23456"},
            ("RANK=0", "OMPI_COMM_WORLD_RANK=2", "unset RANK WORLD_SIZE MASTER_ADDR MASTER_PORT\n", "unset OMPI_"),
        ),
        ({"RANK": "0", "WORLD_SIZE": "2"} | PMI, ("RANK=0", "PMI_RANK=1")),
        ({"RANK": "1", "WORLD_SIZE": "4"} | PMI, ("WORLD_SIZE=4", "PMI_SIZE=2")),
        (OPEN_MPI | PMI, ("OMPI_COMM_WORLD_SIZE=6", "PMI_SIZE=2")),
        # torchrun, started by mpiexec, that knows nothing of other machines
        (TORCHRUN | {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "1"}, ("RANK=5",)),
    ],
)
def test_two_launchers_that_disagree_are_named_with_what_to_unset(variables, words, monkeypatch):
    text = refusal(variables, monkeypatch)
    assert all(word in text for word in words), text


@pytest.mark.parametrize(
    ("variables", "word"),
    [
        (TORCHRUN | {"WORLD_SIZE": ""}, "WORLD_SIZE is not"),
        (TORCHRUN | {"RANK": ""}, "RANK is not"),
        *((TORCHRUN | {"RANK": text}, "RANK needs") for text in ("x", "1.0", "9" * 5000, "٣", "8", "-1")),
        (TORCHRUN | {"WORLD_SIZE": "0"}, "WORLD_SIZE needs"),
        (TORCHRUN | {"LOCAL_RANK": "4"}, "LOCAL_RANK needs"),
        (TORCHRUN | {"LOCAL_RANK": "8", "LOCAL_WORLD_SIZE": ""}, "LOCAL_RANK needs"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE needs"),
        *((TORCHRUN | {"MASTER_PORT": text}, "MASTER_PORT needs") for text in ("65536", "http")),
        *((OURS | {"LOCAL_WORLD_SIZE": text}, "LOCAL_WORLD_SIZE") for text in ("0", "5")),
        (OURS | {"GRADSYNC_ADDRESS": "node0"}, "GRADSYNC_ADDRESS"),
        (OURS | {"GRADSYNC_HOSTED": "1"}, "leave it out"),  # what 0.2 had
        (OURS | {"GRADSYNC_RANK": "3"}, "RANK, which torchrun has too"),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "4(2)"}, "4(2)"),
        (SLURM | {"SLURM_NODEID": "3"}, "SLURM_NODEID=3"),
        (SLURM | {"SLURM_LOCALID": "4"}, "SLURM_LOCALID needs"),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "7"}, "SLURM_PROCID needs"),
    ],
)
def test_a_malformed_value_is_named(variables, word, monkeypatch):
    assert word in refusal(variables, monkeypatch)


@pytest.mark.parametrize("secret", ["abc", "ab" * 15, "zz" * 32])
def test_a_wrong_secret_is_refused_and_not_shown(secret, monkeypatch):
    there = {"GRADSYNC_ADDRESS": "127.0.0.1:9"}
    text = refusal(OURS | there | {"GRADSYNC_SECRET": secret}, monkeypatch)
    assert "GRADSYNC_SECRET" in text
    assert secret not in text


def test_questions_change_nothing(monkeypatch):
    """A program that is started next must find the secret, too."""
    for name, value in (OURS | {"GRADSYNC_SECRET": "5a" * 32}).items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    assert gs.is_launched()
    with pytest.raises(gs.InvalidArgument):
        gs.init_process_group("shm", timeout_seconds=0.1)  # no address
    assert dict(os.environ) == before


# -- Where ranks of Slurm meet -----------------------------------------------------------------------------------------


def master(variables):
    it = found(variables)
    return it.master_addr, it.master_port, it.run_name


def test_slurm_says_where_to_meet():
    here = SLURM | {"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}
    here |= {"SLURM_LOCALID": "1", "SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": "2"}
    names = [master(here | change)[2] for change in ({}, {"SLURM_RESTART_COUNT": "3"}, {"SLURM_STEP_ID": "1"})]
    assert len(set(names)) == 3
    assert None not in names
    assert master(here)[:2] == (None, None)
    assert master(here | {"MASTER_ADDR": "n", "MASTER_PORT": "9"})[2] == names[0]
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


# -- gradsync's own variables: what each refuses is in test_launch, and in the tests of its room -----------------------


def test_a_blank_variable_is_as_none(monkeypatch):
    for name in ("BACKEND", "COLLECTIVE_TIMEOUT_SECONDS", "LOG", "SECRET", "ADDRESS", "SECRET_FILE"):
        monkeypatch.setenv(f"GRADSYNC_{name}", " ")
    with gs.init_process_group() as comm:
        assert (comm.backend, comm.world_size) == ("local", 1)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("GRADSYNC_TIMOUT", "GRADSYNC_COLLECTIVE_TIMEOUT_SECONDS"),
        ("GRADSYNC_TIMEOUT", "GRADSYNC_COLLECTIVE_TIMEOUT_SECONDS"),
        ("GRADSYNC_SECRETFILE", "GRADSYNC_SECRET_FILE"),
        ("GRADSYNC_TRACE_DIR", "GRADSYNC_TRACE"),
        ("GRADSYNC_RECORDER_ENTRIES", "GRADSYNC_FLIGHT_RECORDER_ENTRIES"),
        ("GRADSYNC_", None),
        ("GRADSYNC_HEARTBEAT", None),
    ],
)
def test_the_variable_that_was_meant_is_found(name, meant, monkeypatch, caplog):
    monkeypatch.setenv(name, "1")
    with gs.init_process_group("local"):
        pass
    [line] = [record.getMessage() for record in caplog.records if f"{name}: " in record.getMessage()]
    assert ("did you mean" in line) == (meant is not None)
    assert meant is None or f"{meant}?" in line


def test_gradsync_log_sets_the_level_and_logs_once(cli):
    code = """if True:
        import logging
        import gradsync as gs
        for _ in range(2):
            with gs.init_process_group("local"):
                pass
        logging.getLogger("gradsync").info("seen")
        logging.getLogger("gradsync").debug("unseen")
        """
    done = cli.python("-c", code, environment={"GRADSYNC_LOG": "info"})
    assert [line.rpartition(": ")[2] for line in done.err.splitlines() if "seen" in line] == ["seen"], done
