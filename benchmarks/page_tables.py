"""The tables of the pages: the results under benchmarks/results, their layout, and the line below each table."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from comparison_tables import comparison, knobs, lists, thresholds
from contract_coverage import coverage
from failure_tables import detection, detection_at_a_glance, fault_matrix, kills, model_check, restarts, simulation
from security_tables import hostile, transcripts
from timing_tables import (
    adapters,
    first_edition,
    nccl_host_cost,
    over_mpi,
    partition,
    real_model,
    rendezvous_scale,
    start_up,
    steady_cost,
    timings,
    training_speed,
)

RESULTS = Path(__file__).parent / "results"

#: How the results of each benchmark become a table.
LAYOUTS: dict[str, Callable[[dict[str, Any]], list[str]]] = {
    "basic_costs": timings,
    "all_reduce": comparison,
    "collectives": comparison,
    "buckets": lists,
    "buckets.thresholds": thresholds,
    "buckets.knobs": knobs,
    "training_speed": training_speed,
    "start_up": start_up,
    "beside_mpi4py": over_mpi,
    "torch_adapter": adapters,
    "gpt2_training": real_model,
    "first_edition": first_edition,
    "nccl_host_cost": nccl_host_cost,
    "rendezvous_scale": rendezvous_scale,
    "failure_detection": detection,
    "failure_detection.at_a_glance": detection_at_a_glance,
    "fault_matrix": fault_matrix,
    "proof_model_check": model_check,
    "proof_simulation": simulation,
    "proof_kills": kills,
    "proof_restarts": restarts,
    "network_partition": partition,
    "contract": coverage,
    "steady_cost": lambda results: steady_cost(results, ("recorder", "agreement", "heartbeats", "all three")),
    "steady_cost.debug": lambda results: steady_cost(results, ("debug mode", "tracing")),
    "proof_transcripts": transcripts,
    "proof_hostile": hostile,
}
#: docs/performance.md says once that its tables show medians, and that the compared programs took turns.
METHOD = "The times were measured with two ranks", ""
_MEDIANS = "The table shows medians. The compared programs took turns"
_AS_PROVEN = "`{command}` makes the table"
_BOLD = "Each time begins with the failure. Times above their limit are in bold"
_COST = "The benchmark compares steps with and without a feature. The cost is the increase of the lower quartile"
#: The line below a table, before and after the machine; {command} is the command in the file of results.
METHODS = {
    "all_reduce": (
        METHOD[0],
        'In the rows "busy cores", other processes do not run in every round. If such a time is below the time on idle '
        "cores, the difference is noise",
    ),
    "collectives": (
        METHOD[0],
        "The table names the size of a rank's input (all_gather, all_to_all), of its output (reduce_scatter), or "
        "of the array (broadcast)",
    ),
    "buckets": (
        METHOD[0],
        "MPI reduces the gradients one by one (each), or all of them as one array (flat). The time of "
        "DDP is its backward pass minus the same pass in `no_sync()`",
    ),
    "training_speed": (
        "The times were measured",
        f"{_MEDIANS}. All runs train on the same batches to the same accuracy. The last column is the speed-up: the "
        "fastest time with one process, divided by the time with the ranks. "
        "`python benchmarks/training_speed.py` makes the table",
    ),
    "start_up": ("The times were measured", ""),
    "beside_mpi4py": (
        "The times were measured with two ranks of MPICH",
        f"{_MEDIANS}. `make bench-mpi` makes the table",
    ),
    "torch_adapter": (
        METHOD[0],
        "The table shows the times of the slower rank. The compared programs took turns. The gradients have the shapes "
        "of ResNet-50 and exist before the pass, so the times are those of the synchronisation alone. "
        "`python benchmarks/torch_adapter.py` makes the table",
    ),
    "gpt2_training": (
        METHOD[0],
        "The table shows medians on the slower rank, without the first step. The compared programs took turns, with "
        "batches of 64 tokens, dropout and AdamW. `python benchmarks/gpt2_training.py` makes the table",
    ),
    "first_edition": (
        METHOD[0],
        'The table shows medians over blocks with a 95 % interval. The column "noise" compares version 0.1 with '
        "itself. `python benchmarks/two_checkouts.py --old FOLDER` makes the table",
    ),
    "nccl_host_cost": ("The times were measured", "`python benchmarks/nccl_host_cost.py --old FOLDER` makes the table"),
    "network_partition": (
        "The times were measured between two network namespaces",
        "`python benchmarks/network_partition.py` makes the table",
    ),
    "rendezvous_scale": (
        "The times were measured with simulated ranks",
        f"{_MEDIANS} of the wall time and, in brackets, of the server's processor time. The simulated ranks ran on the "
        "same cores as the server",
    ),
    "steady_cost": (
        METHOD[0],
        f'{_COST}. An interval that includes 0 shows no cost above the noise. The column "alone" is the time of the '
        "feature, measured by itself, divided by the time of a step. `python benchmarks/steady_cost.py` makes the "
        "table",
    ),
    "steady_cost.debug": (METHOD[0], _COST),
    "proof_transcripts": ("The test ran", "`{command}` makes the table"),
    "proof_hostile": ("The times were measured", "The server runs in its own process. `{command}` makes the table"),
    "failure_detection": ("The times were measured", _BOLD),
    "failure_detection.at_a_glance": (METHOD[0], _BOLD),
    "fault_matrix": (
        "The times were measured with three ranks",
        "Times above their limit are in bold. `{command}` makes the table",
    ),
    "proof_model_check": ("The search ran", _AS_PROVEN),
    "proof_simulation": ("The simulation ran", _AS_PROVEN),
    "proof_kills": ("The test ran", _AS_PROVEN),
    "proof_restarts": ("The test ran with three ranks", _AS_PROVEN),
    "contract": (
        "The tests in `tests/contract*.py` recorded these combinations",
        "`python tests/prove/pages/coverage_table.py` makes the table",
    ),
}


def table(name: str) -> str:
    """Returns the committed results as a table, or a line that they are not measured yet.

    Args:
        name: of the results, and after a dot of one of the tables that are made of them.
    """
    path = RESULTS / f"{name.partition('.')[0]}.json"
    if not path.exists():
        return "Not measured yet.\n"
    results = json.loads(path.read_text())
    lines, how = LAYOUTS[name](results), METHODS.get(name, METHOD)
    machine, versions = results["machine"], results["versions"]
    where = f"{machine['cpu']}, {machine['usable_cores']} cores, Python {versions['python']}, NumPy {versions['numpy']}"
    made = how[1].format(command=results.get("command", "").partition(" --json ")[0])
    return "\n".join(lines) + f"\n\n{how[0]} on {where}. {made}{'.' if made else ''}".rstrip() + "\n"
