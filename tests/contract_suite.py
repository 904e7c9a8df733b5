"""Runs the checks of the contract on one communicator; called on every rank."""

from __future__ import annotations

import traceback
from typing import Any, NamedTuple

import numpy as np
from pipe_backend import connect_pipes

import contract
import contract_asynchronous
import contract_disagreement
import contract_groups
import contract_messages
import contract_movements
import contract_objects
import contract_reductions
import contract_refusals
import contract_resident
import gradsync as gs
from contract import KITS, expect
from gradsync import process_group
from gradsync.communicators.communicator import Communicator

#: The parts of the contract; each is run by itself.
PARTS = {
    "reductions": (contract_reductions, contract_resident),
    "movements": (contract_movements,),
    "messages": (contract_messages,),
    "groups": (contract_groups,),
    "objects": (contract_objects,),
    "asynchronous": (contract_asynchronous,),
    "refusals": (contract_refusals,),
    "disagreement": (contract_disagreement,),
}


class Findings(NamedTuple):
    """What one rank found.

    Attributes:
        failure: the name of the check that failed with its traceback; empty where all passed.
        notes: (collective, dtype, operator) of what was compared with its reference.
    """

    failure: str
    notes: list[tuple[str, str, str]]


def checks_of(part: str) -> list[Any]:
    modules = PARTS[part]
    return [value for module in modules for name, value in vars(module).items() if name.startswith("check_")]


def run_part(comm: Any, part: str, kit_name: str = "numpy") -> Findings:
    """Runs the checks of a part until one fails: then the ranks are no longer at the same place."""
    contract.NOTES.clear()
    kit = KITS[kit_name]()
    for check in checks_of(part):
        try:
            check(comm, kit)
        except Exception:
            return Findings(f"{check.__name__}\n{traceback.format_exc()}", [])
    comm.close()
    assert_unusable(comm, kit)
    return Findings("", sorted(contract.NOTES))


def run_part_anew(_comm: Any, part: str, kit_name: str, options: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Runs a part in a process group of its own, on ranks that stay, and returns its notes.

    Raises:
        AssertionError: with the check that failed.
    """
    gs.destroy_process_group()
    world = gs.init_process_group(timeout_seconds=30.0, collective_timeout_seconds=30.0, **options)
    findings = run_part(world, part, kit_name)
    if findings.failure:
        world.abort("a check failed")  # others may wait for this rank
        raise AssertionError(findings.failure)
    return findings.notes


def run_part_over_pipes(_comm: Any, part: str) -> None:
    """Runs a part on a communicator whose backend is tests/pipe_backend.py, in a process group of its own.

    Raises:
        AssertionError: with the check that failed.
    """
    gs.destroy_process_group()
    world = gs.init_process_group("shm", timeout_seconds=30.0, collective_timeout_seconds=30.0)
    client: Any = process_group._client
    findings = run_part(Communicator(connect_pipes(client, group="pipes", timeout_seconds=30.0)), part)
    if findings.failure:
        world.abort("a check failed")  # others may wait for this rank
        raise AssertionError(findings.failure)


def assert_unusable(comm: Any, kit: Any) -> None:
    """Every collective of a closed communicator says so, whatever it has or has not been used for before."""
    for dtype in (np.float64, np.float32, np.int8, np.bool_):
        expect(gs.CommunicatorClosed, lambda d=dtype: comm.all_reduce(kit.put(np.zeros(1, d)), "max"), "closed")
    for collective in contract_asynchronous.collectives(comm, kit, (3, 2)).values():
        expect(gs.CommunicatorClosed, lambda c=collective: c(comm), "closed")
