"""The tables of the pages: the results under benchmarks/results, their layout, and the line below each table."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from comparison_tables import at_a_glance, comparison, knobs, lists, thresholds
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
    "buckets.at_a_glance": at_a_glance,
    "training_speed": training_speed,
    "start_up": start_up,
    "over_mpi": over_mpi,
    "adapters": adapters,
    "real_model": real_model,
    "first_edition": first_edition,
    "nccl_host_cost": nccl_host_cost,
    "rendezvous_scale": rendezvous_scale,
    "detection": detection,
    "detection.at_a_glance": detection_at_a_glance,
    "fault_matrix": fault_matrix,
    "proof_model_check": model_check,
    "proof_simulation": simulation,
    "proof_kills": kills,
    "proof_restarts": restarts,
    "partition": partition,
    "contract": coverage,
    "steady_cost": lambda results: steady_cost(results, ("recorder", "agreement", "heartbeats", "all three")),
    "steady_cost.debug": lambda results: steady_cost(results, ("debug mode", "tracing")),
    "proof_transcripts": transcripts,
    "proof_hostile": hostile,
}
METHOD = "Two ranks", "medians; the programs took turns in one run"
_AS_PROVEN = "made by `{command}`, and in full by `make prove`"
#: The line below a table, before and after the machine; {command} is the command in the file of results.
METHODS = {
    "all_reduce": (
        METHOD[0],
        f"{METHOD[1]}. With busy cores a round may meet no busy process: a time below the time on idle cores is noise",
    ),
    "collectives": (
        METHOD[0],
        f"{METHOD[1]}. The size is that of a rank's input (all_gather, all_to_all), of its output (reduce_scatter), or "
        "of the array (broadcast). Samples and limits are in `benchmarks/results/collectives.json`",
    ),
    "buckets": (
        METHOD[0],
        f"{METHOD[1]}. Both MPIs: tensor by tensor, and as one flat array. DDP: its backward pass minus the same pass "
        "in `no_sync()`. Samples and limits are in `benchmarks/results/buckets.json`",
    ),
    "buckets.at_a_glance": (
        METHOD[0],
        f"{METHOD[1]}; MPI tensor by tensor. More times are in docs/performance.md",
    ),
    "training_speed": (
        "Measured",
        f"{METHOD[1]}. All runs train on the same batches to the same accuracy. The last column is the fastest time of "
        "one process divided by the time of the ranks. Made by `python benchmarks/training_speed.py`",
    ),
    "start_up": ("Measured", "medians; the programs took turns in one run"),
    "over_mpi": ("Two ranks of MPICH", "medians; the programs took turns in one run; made by `make bench-mpi`"),
    "adapters": (
        "Two ranks",
        "the slower rank counts, and contenders alternate in one run. The gradients have the shapes of ResNet-50 and "
        "exist already, so nothing is computed. Made by `python benchmarks/adapters.py`",
    ),
    "real_model": (
        "Two ranks",
        "medians of the steps after the first, the slower rank counts, and contenders alternate in one run. Batches of "
        "64 tokens, dropout, AdamW. Made by `python benchmarks/real_model.py`",
    ),
    "first_edition": (
        METHOD[0],
        "medians over blocks with a 95 % interval. Noise: the first edition compared with itself. Made by "
        "`python benchmarks/two_checkouts.py --old FOLDER`",
    ),
    "nccl_host_cost": ("Measured", "made by `python benchmarks/nccl_host_cost.py --old FOLDER`"),
    "partition": ("Two machines made of network namespaces,", "made by `python benchmarks/partition.py`"),
    "rendezvous_scale": (
        "Simulated ranks",
        f"{METHOD[1]}; wall time, with the simulated ranks on the same cores; in brackets the processor time of the "
        "server",
    ),
    "steady_cost": (
        METHOD[0],
        "lower quartiles of alternating steps, with a 95 % interval. An interval that includes 0 shows no cost above "
        "the noise. Counted: the time of the part alone, divided by the time of a step. Made by "
        "`python benchmarks/steady_cost.py`",
    ),
    "steady_cost.debug": (METHOD[0], "lower quartiles of alternating steps, with a 95 % interval"),
    "proof_transcripts": ("Made", "by the command `{command}`"),
    "proof_hostile": ("Measured", "made by `{command}`; the server in a process of its own"),
    "detection": ("Measured", "from the moment of the failure; times above their limit are in bold"),
    "detection.at_a_glance": ("Two ranks", "from the moment of the failure; times above their limit are in bold"),
    "fault_matrix": (
        "Three ranks",
        "times above their limit are in bold; made by `{command}`",
    ),
    "proof_model_check": ("Searched", _AS_PROVEN),
    "proof_simulation": ("Played", _AS_PROVEN),
    "proof_kills": ("Run", _AS_PROVEN),
    "proof_restarts": ("Three ranks", _AS_PROVEN),
    "contract": (
        "Recorded by the checks of `tests/contract*.py`",
        "made by `python tests/prove/pages/coverage_table.py`",
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
    return "\n".join(lines) + f"\n\n{how[0]} on {where}; {made}.\n"
