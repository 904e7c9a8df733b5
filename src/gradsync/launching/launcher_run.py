"""A call of a function that `launcher` has decorated: from the function to the ranks' results."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gradsync.arguments import parse_address, port_beside
from gradsync.launching.cuda_state import check_cuda_untouched
from gradsync.launching.function_outcome import failure, raise_for_signal, take_results, what_became_of_others
from gradsync.launching.in_rank.group_call import call_in_group
from gradsync.launching.in_rank.named_function import NamedFunction
from gradsync.launching.job import Job, Network
from gradsync.launching.launcher_options import LauncherOptions
from gradsync.launching.meeting_points import own_endpoint
from gradsync.launching.start_method_choice import chosen_start_method
from gradsync.launching.supervisor import supervise
from gradsync.launching.targets import function_name, function_target, ranks_can_import_main
from gradsync.rendezvous.secret_files import Endpoint


def run_on_ranks(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], options: LauncherOptions
) -> list[Any]:
    """Runs a function on the ranks of this node; `launcher` says what it gives and raises."""
    method = chosen_start_method("launcher", options.start_method)
    count, world_size = options.count_processes()
    has_other_nodes = count < world_size
    reference = function if method == "fork" else _reference(function)
    call = functools.partial(call_in_group, reference, options.group_backend, has_other_nodes)
    name = function_name(function)
    target = function_target(call, args, kwargs, name, start_method=method)
    check_cuda_untouched(name, method)
    with own_endpoint(options, has_other_nodes=has_other_nodes) as (endpoint, listener):
        job = Job(
            target,
            count,
            world_size=world_size,
            rank_start=options.rank_start,
            backend=options.group_backend,
            master_addr=options.master_host,
            master_port=_master_port(endpoint) if endpoint is not None and has_other_nodes else None,
            rendezvous_port=options.port,
            endpoint=endpoint,
            listener=listener,
            network=_network_to_others(endpoint) if endpoint is not None and has_other_nodes else None,
            start_method=method,
        )
        outcome = supervise(job)
    raise_for_signal(outcome)
    root = outcome.root_cause
    if root is not None:
        raise failure(outcome, root, f"{root.describe()}; {what_became_of_others(root)}")
    return take_results(outcome, stacklevel=3)


def _network_to_others(endpoint: Endpoint) -> Network | None:
    """Gives by what this machine reaches the node that hosts."""
    from gradsync.launching.network import network_towards  # here: few calls have other nodes

    return network_towards(*parse_address(endpoint.address))


def _reference(function: Callable[..., Any]) -> NamedFunction | Callable[..., Any]:
    """Gives what a fresh rank finds the function by, or the function itself where it has no name to be found by."""
    named = NamedFunction(getattr(function, "__module__", ""), getattr(function, "__qualname__", ""))
    if named.module == "__main__" and not ranks_can_import_main():
        return function
    return named if named.is_found_as(function) else function


def _master_port(endpoint: Endpoint) -> int:
    """Gives a MASTER_PORT that is the same on all nodes, and leaves the rendezvous its own."""
    return port_beside(parse_address(endpoint.address)[1])
