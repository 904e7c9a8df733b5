"""Who is in a group and who is not, and how members wait for one another."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest

import gradsync as gs
from gradsync.communicators.groups import NonMember
from gradsync.communicators.local import local_communicator
from gradsync.communicators.world import group_or_world

# -- Who is not -----------------------------------------------------------------------------------------------------


def test_a_communicator_is_true_and_a_non_member_is_not() -> None:
    assert local_communicator()
    nobody = NonMember("rank 1/4", "the group of ranks 0,2")
    assert not nobody
    assert repr(nobody) == "<NonMember: rank 1/4 is not a member of the group of ranks 0,2>"
    with pytest.raises(AttributeError, match=r"not a member of the group of ranks 0,2 and cannot use the group's"):
        nobody.all_reduce(np.ones(2))
    assert not hasattr(nobody, "rank")
    for other in (copy.copy(nobody), pickle.loads(pickle.dumps(nobody))):
        assert repr(other) == repr(nobody)


TAKERS: dict[str, Any] = {
    "bcast_list_": lambda group: gs.bcast_list_([np.ones(2)], communicator=group),
    "bcast_list_ by group=": lambda group: gs.bcast_list_([np.ones(2)], group=group),
    "broadcast_tree": lambda group: gs.broadcast_tree({"w": np.ones(2)}, communicator=group),
    "check_consistency": lambda group: gs.check_consistency([np.ones(2)], group),
    "group_barrier": lambda group: gs.group_barrier(group),
    "shard_indices": lambda group: gs.shard_indices(5, communicator=group),
    "pack_allreduce_split": lambda group: gs.pack_allreduce_split([np.ones(2)], [(2,)], group),
    "AllreduceCallback": lambda group: gs.AllreduceCallback(group=group),
    "all_gather": lambda group: gs.comm.all_gather(1, group=group),
    "gather": lambda group: gs.comm.gather(1, group=group),
}


@pytest.mark.parametrize("name", list(TAKERS))
def test_who_is_no_member_does_not_take_the_world_for_the_group(name: str) -> None:
    nobody = NonMember("rank 0/1", "the group of ranks 1,2")
    what = name.partition(" ")[0]
    with gs.init_process_group("local"):
        text = f"rank 0/1 is not a member of the group of ranks 1,2: call {what} within `if group:`"
        with pytest.raises(gs.InvalidArgument, match=text):
            TAKERS[name](nobody)
        with pytest.raises(
            gs.InvalidArgument, match=f"rank 0/1: {what} needs .* to be a Communicator or None, got list"
        ):
            TAKERS[name]([0, 1])


def test_the_argument_is_named_as_the_caller_spells_it() -> None:
    with pytest.raises(gs.InvalidArgument, match="^f needs communicator to be a Communicator or None, got int"):
        group_or_world(3, "f", "communicator")  # type: ignore[arg-type]
    with pytest.raises(gs.InvalidArgument, match="^f: the process group is not initialised"):
        group_or_world(None, "f")
