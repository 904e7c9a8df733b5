"""Imports go down only, and importing gradsync costs next to nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import gradsync as gs

SOURCE = Path(gs.__file__).parent

# Each layer may import itself and what stands above it in this list. A name is a module or a package.
LAYERS = [
    ("errors",),
    ("reduction", "cost_model", "nccl_cost_model"),
    ("scalars_by_name",),
    (
        "secret_file",
        "cores",
        "variable_values",
        "slurm_variables",
        "launcher_variables",
        "run_name",
        "completion",
        "collective_end",
        "collective_future",
        "deadline_call",
        "machine",
        "interfaces",
    ),
    (
        "environment",
        "tls_files",
        "meeting_file",
        "rendezvous",
        "divergence",
        "bucketing.plan",
        "bucketing.fixed_plan",
        "bucketing.threshold_tuner",
        "bucketing.shapes_file",
        "bucketing.flat_buffer",
        "bucketing.pack_kernels",
        "bucketing.future",
        "bucketing.statistics",
        "bucketing.bucket_ends",
    ),
    ("settings", "unknown_variables", "whole_file"),
    ("visible_devices", "flight_recorder", "stack_report"),
    ("tracing",),
    ("dumps",),
    ("communicators",),
    (
        "bucketing.step_agreements",
        "bucketing.claimed_memory",
        "bucketing.trees",
        "bucketing.compression",
        "bucketing.bucket_hook",
        "bucketing.shared_results",
    ),
    ("bucketing.finite_check", "bucketing.gradient_norm"),
    ("bucketing.options", "hooks"),
    ("bucketing.pending",),
    ("bucketing.parameter_specs", "bucketing.array_lists", "bucketing.arrivals"),
    ("bucketing.fixed_arrivals", "bucketing.bucket_memory"),
    ("bucketing.bucket_work", "bucketing.missing", "bucketing.step_plan", "bucketing.launch_groups"),
    ("bucketing.bucket_watch",),
    ("bucketing.hooked_buckets", "bucketing.step_values"),
    ("bucketing.step_reduction",),
    ("bucketing.auto_threshold", "bucketing.step_works"),
    ("bucketing.gradient_guard",),
    ("bucketing.backward_pass",),
    ("bucketing.join", "bucketing.with_blocks", "bucketing.forgotten"),
    ("bucketing.callback", "bucketing.parameters", "bucketing.tree_broadcast", "consistency", "sharding"),
    ("bucketing.tree_average",),
    ("mpi_meeting",),
    ("bootstrap", "backend_choice"),
    ("world_connection",),
    ("world_siblings",),
    ("process_group", "backend_override"),
    ("synchronising", "comm"),
    ("adapters.torch_tensors",),
    ("adapters.torch_module",),
    ("adapters.torch_backward",),
    ("adapters",),
    ("launching",),
    ("diagnostics",),
    ("bench",),
    ("doctor",),
    ("cli",),
    ("__main__",),
]


def layer_of(module: str) -> int:
    for number, names in enumerate(LAYERS):
        if any(module == name or module.startswith(name + ".") for name in names):
            return number
    raise AssertionError(f"{module} is in no layer: add it to LAYERS")


def modules() -> dict[str, Path]:
    found = {}
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        if parts[-1] != "__init__":
            found[".".join(parts)] = path
    return found


def imported_names(path: Path) -> set[str]:
    """What a file imports anywhere, inside functions too: modules, and names in them."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def imports_of(path: Path) -> set[str]:
    """The modules of ours that a file imports."""
    names = imported_names(path)
    ours = {name.removeprefix("gradsync.") for name in names if name.startswith("gradsync.")}
    return {name for name in ours if name in modules()}


@pytest.mark.parametrize("module", sorted(modules()))
def test_imports_go_down_only(module: str) -> None:
    for imported in imports_of(modules()[module]):
        assert layer_of(imported) <= layer_of(module), f"{module} imports {imported}, which is above it"


CORE = [
    "protocol",
    "generation",
    "roster",
    "members",
    "waiting",
    "places",
    "agreement_places",
    "keys",
    "forgetting",
    "absence",
    "absence_report",
    "disagreement",
    "verdict_texts",
    "silence",
    "finding",
    "events",
]


@pytest.mark.parametrize("module", CORE)
def test_the_core_of_the_rendezvous_does_no_io(module: str) -> None:
    """Neither itself nor by what it imports of ours: events go in, actions come out."""
    reached, left = set(), [f"rendezvous.{module}"]
    while left:
        name = left.pop()
        reached.add(name)
        left += imports_of(modules()[name]) - reached
    assert not reached & {"rendezvous.probing", "rendezvous.sockets", "rendezvous.event_loop"}
    for name in reached:
        names = imported_names(modules()[name])
        assert not names & {"socket", "select", "selectors", "threading", "subprocess"}, name


BACKENDS = ["shared_memory", "nccl", "mpi"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_backends_are_built_side_by_side(backend: str) -> None:
    """What two of them need stands above both. Beside GPUs bytes travel through shared memory: that is no accident."""
    allowed = {backend, "shared_memory"} if backend == "nccl" else {backend}
    own = [path for module, path in modules().items() if module.startswith(f"communicators.{backend}.")]
    imported = {name.split(".")[1] for path in own for name in imports_of(path) if name.startswith("communicators.")}
    assert own
    assert imported & set(BACKENDS) <= allowed


def test_the_callback_knows_no_concrete_communicator() -> None:
    concrete = {"communicators.local", *(f"communicators.{backend}.communicator" for backend in BACKENDS)}
    assert concrete <= modules().keys()
    assert not imports_of(modules()["bucketing.callback"]) & concrete


def loaded_after(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return set(done.stdout.split())


def test_importing_gradsync_is_light() -> None:
    heavy = {"cupy", "multiprocessing", "msgpack", "numpy", "click", "rich"}
    assert not loaded_after("import gradsync") & heavy


def test_a_process_group_needs_no_multiprocessing() -> None:
    loaded = loaded_after("import gradsync as gs; gs.init_process_group('local'); gs.AllreduceCallback")
    assert not loaded & {"cupy", "multiprocessing", "click", "rich"}


@pytest.mark.parametrize(("adapter", "library"), [("torch", "PyTorch"), ("jax", "JAX")])
def test_an_adapter_without_its_library_says_how_to_get_it(adapter: str, library: str) -> None:
    code = (
        f"import sys; sys.modules[{adapter!r}] = None\n"  # as where it is not installed
        f"try:\n    import gradsync.adapters.{adapter}\nexcept ImportError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == f"gradsync.adapters.{adapter} needs {library}: pip install 'gradsync[{adapter}]'\n"


def test_every_public_name_loads() -> None:
    for name in gs.__all__:
        assert getattr(gs, name) is not None
    assert set(gs.__all__) <= set(dir(gs))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = gs.nothing


def test_inspection_works_before_anything_is_initialised() -> None:
    assert not hasattr(gs, "WORLD")
    assert loaded_after("from gradsync import *; import gradsync, inspect, pydoc; inspect.getmembers(gradsync)")
    assert loaded_after("import gradsync, pydoc; pydoc.render_doc(gradsync)")


def test_type_checkers_see_the_public_names() -> None:
    """What is imported for type checkers is what loads at run time, from the same place."""
    seen = {}
    for node in ast.walk(ast.parse((SOURCE / "__init__.py").read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("gradsync."):
            seen |= {alias.asname: node.module for alias in node.names if alias.asname}
    assert seen == gs._HOME
