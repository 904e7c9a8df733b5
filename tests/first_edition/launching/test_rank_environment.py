import os

import pytest

from gradsync import environment
from gradsync.errors import InvalidArgument
from gradsync.launching.job import Job, Network, NodePlace, Target
from gradsync.launching.rank_environment import rank_environment
from gradsync.rendezvous.secret_files import Endpoint

TARGET = Target({}, ())
POINT = Endpoint("127.0.0.1:4000", b"s" * 32)


def variables(job, local_rank=0, environ=None, restart=0):
    return rank_environment(job, local_rank, POINT, 4321, restart, environ or {})


def test_our_variables_name_the_place_and_the_meeting_point():
    job = Job(TARGET, 2, world_size=6, rank_start=4, backend="shm", max_restarts=3, state_dir="state")
    found = variables(job, 1, restart=2)
    assert found[environment.RANK] == found["RANK"] == "5"
    assert found[environment.WORLD_SIZE] == found["WORLD_SIZE"] == "6"
    assert found[environment.LOCAL_RANK] == found["LOCAL_RANK"] == "1"
    assert found[environment.LOCAL_WORLD_SIZE] == found["LOCAL_WORLD_SIZE"] == "2"
    assert (found[environment.ADDRESS], found[environment.HOSTED]) == ("127.0.0.1:4000", "1")
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("127.0.0.1", "4321")
    assert found[environment.BACKEND] == "shm"
    assert (found[environment.RESTART_COUNT], found[environment.MAX_RESTARTS]) == ("2", "3")
    assert found[environment.STATE_DIR] == os.path.abspath("state")


def test_scripts_written_for_torchrun_find_its_variables():
    found = variables(Job(TARGET, 3, max_restarts=3), 2, restart=1)
    expected = {
        "RANK": "2",
        "LOCAL_RANK": "2",
        "WORLD_SIZE": "3",
        "LOCAL_WORLD_SIZE": "3",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default",
        "ROLE_RANK": "2",
        "ROLE_WORLD_SIZE": "3",
        "TORCHELASTIC_RESTART_COUNT": "1",
        "TORCHELASTIC_MAX_RESTARTS": "3",
    }
    assert expected.items() <= found.items()


def test_each_rank_sees_its_own_gpu_and_else_what_the_launcher_sees():
    job = Job(TARGET, 2, gpus=("4", "5"))
    visible = {"CUDA_VISIBLE_DEVICES": "4,5,6"}
    assert [variables(job, rank, visible)["CUDA_VISIBLE_DEVICES"] for rank in range(2)] == ["4", "5"]
    assert variables(Job(TARGET, 2), 1, visible)["CUDA_VISIBLE_DEVICES"] == "4,5,6"


def test_what_belongs_to_another_run_or_was_to_be_removed_does_not_reach_a_rank():
    around = {
        environment.SECRET: "ab" * 32,
        environment.SECRET_FILE: "/secret",
        environment.STATE_DIR: "/old",
        "https_proxy": "x",
        "HOME": "/h",
    }
    found = variables(Job(TARGET, 1, removed_variables=frozenset({"https_proxy"})), environ=around)
    assert not set(around) & set(found) - {"HOME"}
    assert found["HOME"] == "/h"


def test_the_secret_is_not_among_them_nor_shown():
    found = variables(Job(TARGET, 1))
    assert not any(POINT.secret.hex() in value for value in found.values())
    assert "sss" not in repr(POINT)


def test_the_cores_are_shared_unless_the_user_has_said_how():
    assert "OMP_NUM_THREADS" in variables(Job(TARGET, 2))
    assert variables(Job(TARGET, 2), environ={"OMP_NUM_THREADS": "7"})["OMP_NUM_THREADS"] == "7"


@pytest.mark.parametrize("count", [0, -1, 1.5, "2", None, True])
def test_number_of_processes_is_checked(count):
    with pytest.raises(InvalidArgument, match="the number of processes to be an integer of at least 1"):
        Job(TARGET, count)


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ({"rank_start": -1}, "the launch needs rank_start to be an integer of at least 0, got -1"),
        ({"rank_start": 2, "world_size": 3}, "world_size to be an integer of at least 4, got 3"),
        ({"master_port": 65536}, "master_port to be an integer of 0 to 65535, got 65536"),
        ({"rendezvous_port": "4000"}, "rendezvous_port to be an integer of 0 to 65535, got '4000'"),
        ({"grace_seconds": -0.5}, "the grace period to be a number of seconds, 0 or more, got -0.5"),
        ({"grace_seconds": float("nan")}, "the grace period to be .* got nan"),
        ({"grace_seconds": float("inf")}, "the grace period to be .* got inf"),
        ({"max_restarts": -1}, "max_restarts to be an integer of at least 0, got -1"),
    ],
)
def test_other_numbers_are_checked(numbers, text):
    with pytest.raises(InvalidArgument, match=text):
        Job(TARGET, 2, **numbers)


def test_start_method_is_checked():
    with pytest.raises(InvalidArgument, match=r"start method needs to be one of .*'forkserver'.*got 'thread'"):
        Job(TARGET, 1, start_method="thread")


def test_a_machine_among_others_tells_its_place_and_its_network():
    node, network = NodePlace(2, 3, "run"), Network("eth1", is_ipv6=False)
    job = Job(TARGET, 1, world_size=6, rank_start=5, node=node, network=network)
    found = variables(job)
    assert (found["GROUP_RANK"], found["GROUP_WORLD_SIZE"]) == ("2", "3")
    assert found["TORCHELASTIC_RUN_ID"] == "gradsync-run"
    assert found["NCCL_SOCKET_IFNAME"] == "=eth1"
    assert "NCCL_SOCKET_FAMILY" not in found
    over_ipv6 = variables(Job(TARGET, 1, network=Network("eth1", is_ipv6=True)))
    assert over_ipv6["NCCL_SOCKET_FAMILY"] == "AF_INET6"


def test_the_network_that_the_user_has_named_counts_more():
    mine = {"NCCL_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_FAMILY": "AF_INET"}
    found = variables(Job(TARGET, 1, network=Network("eth1", is_ipv6=True)), environ=mine)
    assert mine.items() <= found.items()


def test_ranks_of_one_machine_choose_their_network_as_ever():
    assert "NCCL_SOCKET_IFNAME" not in variables(Job(TARGET, 1))
