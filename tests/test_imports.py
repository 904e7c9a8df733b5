"""Imports go down only, and importing gradsync costs next to nothing."""

from __future__ import annotations

import ast
import functools
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

import gradsync as gs

SOURCE = Path(gs.__file__).parent

# Each room may import those that stand before it. A package is a room, and so is a file beside the packages.
ROOMS = [
    *(
        "errors",
        "removed",
        "hooks",
        "adapters",
        "arguments",
        "machine",
        "reduction",
        "futures",
        "backends",
        "environment",
    ),
    *("diagnostics", "rendezvous", "communicators", "bucketing", "backend_choice", "process_group"),
    *("sharding", "consistency", "comm", "launching", "bench", "doctor", "cli"),
]

# Files beside the packages that do not lie in their room yet. Other rooms may import them as long as they are there.
STRAYS = {
    "cli": "__main__",
}
ROOM_OF_STRAY = {stray: room for room, strays in STRAYS.items() for stray in strays.split()}

# Today's exceptions: files inside a room that are imported from outside, and by which rooms. The list only shrinks: an
# entry that is no longer needed fails the test. Outside, a room is its name: from
# gradsync.rendezvous import ..., where rendezvous/__init__.py says what others may use.
INSIDE = {
    "bench.collectives": "cli",
    "bench.report": "doctor",
    "bench.thresholds": "cli",
    "bucketing.callback": "bench",
    "bucketing.plan": "bench",
    "communicators.agreement": "bucketing comm",
    "communicators.backend": "backend_choice bucketing",
    "communicators.communicator": "backend_choice bench bucketing comm consistency process_group sharding",
    "communicators.failures": "process_group",
    "communicators.for_bucketing": "bucketing",
    "communicators.groups": "bucketing process_group",
    "communicators.host_arrays": "bucketing consistency",
    "communicators.host_copy": "bucketing",
    "communicators.host_values": "bucketing",
    "communicators.lifetime": "bucketing process_group",
    "communicators.local": "comm",
    "communicators.mpi.mpi_job": "doctor process_group",
    "communicators.nccl.library": "doctor",
    "communicators.shared_memory.segment": "doctor",
    "communicators.world": "bench bucketing comm consistency process_group sharding",
    "diagnostics.compare": "rendezvous",
    "diagnostics.trace": "bucketing communicators launching process_group",
    "doctor.command": "cli",
    "launching.launcher": "bench",
    "launching.run": "cli",
    "rendezvous.client": "backend_choice communicators process_group",
    "rendezvous.connection": "launching",
    "rendezvous.frames": "backend_choice communicators",
    "rendezvous.hosting": "communicators process_group",
    "rendezvous.secret_files": "launching",
    "rendezvous.server": "cli launching",
    "rendezvous.sockets": "launching",
}


@functools.cache
def modules() -> dict[str, Path]:
    """Every file of the library but its own __init__.py, which shows names of all rooms."""
    found = {}
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if name:
            found[name] = path
    return found


def room_of(module: str) -> str:
    """A room that is being rebuilt in _next is the room."""
    first = module.removeprefix("_next.").split(".")[0]
    return ROOM_OF_STRAY.get(first, first)


def is_face(module: str) -> bool:
    """Whether other rooms may import a module: it is a room or a file beside the rooms, not one inside."""
    return "." not in module.removeprefix("_next.")


@functools.cache
def imported_names(path: Path) -> set[str]:
    """What a file imports anywhere, inside functions and for type checkers too: modules, and names in them."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


@functools.cache
def imports_of(path: Path) -> set[str]:
    """The modules of ours that a file imports. Of `from gradsync.room.file import name` that is the file alone."""
    ours = {name.removeprefix("gradsync.") for name in imported_names(path) if name.startswith("gradsync.")}
    found = {name for name in ours if name in modules()}
    return {name for name in found if not any(other.startswith(name + ".") for other in found)}


@functools.cache
def imports_between_rooms() -> list[tuple[str, str]]:
    """(importing module, imported module) of all imports whose ends are in different rooms."""
    pairs = [(module, imported) for module, path in modules().items() for imported in imports_of(path)]
    return [(module, imported) for module, imported in pairs if room_of(module) != room_of(imported)]


def test_every_module_is_in_a_room() -> None:
    assert sorted({room_of(module) for module in modules() if module != "_next"} - set(ROOMS)) == []
    assert sorted(ROOM_OF_STRAY.keys() - modules().keys()) == []


def test_rooms_import_only_those_before_them() -> None:
    pairs = imports_between_rooms()
    upward = [pair for pair in pairs if ROOMS.index(room_of(pair[0])) < ROOMS.index(room_of(pair[1]))]
    assert not upward, f"these import a room that stands after their own in ROOMS: {upward}"


def test_the_inside_of_a_room_is_not_imported_from_outside() -> None:
    inside = {(other, room_of(module)) for module, other in imports_between_rooms() if not is_face(other)}
    listed = {(name, room) for name, rooms in INSIDE.items() for room in rooms.split()}
    new, unneeded = sorted(inside - listed), sorted(listed - inside)
    assert not new, f"these rooms import a file inside another room, not what its __init__.py offers: {new}"
    assert not unneeded, f"delete these from INSIDE: {unneeded}"


def test_no_imports_go_in_a_circle() -> None:
    """Not even for type checkers."""
    graphlib.TopologicalSorter({name: imports_of(path) for name, path in modules().items()}).prepare()


def test_nothing_imports_a_room_that_is_being_rebuilt() -> None:
    assert [
        f"{module} imports {imported}"
        for module, path in modules().items()
        for imported in imports_of(path)
        if imported.startswith("_next") and not module.startswith("_next")
    ] == []


def test_the_core_of_the_rendezvous_does_no_io() -> None:
    """Neither itself nor by what it imports of ours: events go in, actions come out.

    Of `liveness` it has the clocks alone; the looks at processes beside them are for the loop and for clients.
    """
    looks = {f"gradsync.rendezvous.liveness.{name}" for name in ("inspect_peer", "inspect_process")}
    reached, left = set(), ["rendezvous.protocol"]
    while left:
        name = left.pop()
        reached.add(name)
        left += imports_of(modules()[name]) - reached - {"rendezvous.liveness"}
    for name in reached:
        names = imported_names(modules()[name])
        assert not names & {"socket", "select", "selectors", "threading", "subprocess", *looks}, name


BACKENDS = ["shared_memory", "nccl", "mpi"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_backends_are_built_side_by_side(backend: str) -> None:
    """What two of them need stands above both."""
    own = [path for module, path in modules().items() if module.startswith(f"communicators.{backend}.")]
    imported = {name.split(".")[1] for path in own for name in imports_of(path) if name.startswith("communicators.")}
    assert own
    assert imported & set(BACKENDS) <= {backend}


def test_the_callback_knows_no_concrete_communicator() -> None:
    concrete = {"communicators.local", "communicators.shared_memory.shm_backend"}
    concrete |= {"communicators.nccl.nccl_backend", "communicators.mpi.mpi_backend"}
    assert concrete <= modules().keys()
    assert not imports_of(modules()["bucketing.callback"]) & concrete


def loaded_after(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return set(done.stdout.split())


def test_importing_gradsync_is_light() -> None:
    heavy = {"cupy", "multiprocessing", "msgpack", "numpy", "click", "rich"}
    assert not loaded_after("import gradsync") & heavy


def test_the_main_names_load_no_backend_and_no_rendezvous() -> None:
    """A process takes one backend, and one rank meets nobody."""
    loaded = loaded_after("from gradsync import AllreduceCallback, bcast_list_, init_process_group")
    backends = {f"gradsync.communicators.{backend}.communicator" for backend in BACKENDS}
    assert not loaded & (backends | {"gradsync.rendezvous", "msgpack", "socket", "pathlib", "numpy.typing", "_hashlib"})


def test_a_process_group_needs_no_multiprocessing() -> None:
    loaded = loaded_after("import gradsync as gs; gs.init_process_group('local'); gs.AllreduceCallback")
    assert not loaded & {"cupy", "multiprocessing", "click", "rich"}


def test_every_public_name_loads() -> None:
    for name in gs.__all__:
        assert getattr(gs, name) is not None
    assert set(gs.__all__) <= set(dir(gs))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = gs.nothing
    with pytest.raises(AttributeError, match=r"no attribute 'AlreduceCallback': did you mean AllreduceCallback\?"):
        _ = gs.AlreduceCallback


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("get_rank", "gs.get_communicator().rank"),
        ("get_world_size", "gs.get_communicator().world_size"),
        ("all_reduce", "gs.get_communicator().all_reduce(...)"),
        ("broadcast", "gs.get_communicator().broadcast(...)"),
        ("barrier", "gs.get_communicator().barrier()"),
        ("DistributedDataParallel", "gs.AllreduceCallback and a hook of each parameter (examples/torch_loop.py)"),
        ("DistributedSampler", "gs.shard_indices(len(data), epoch)"),
        ("clip_grad_norm_", 'gs.AllreduceCallback("mean", clip_norm=1.0)'),
        ("no_sync", "arrays of your own to add gradients up in, and hand over each sum once"),
        ("Join", 'gs.AllreduceCallback("sum"), with the number of samples as one more gradient (docs/uneven.md)'),
    ],
)
def test_names_of_torch_say_what_to_use(name: str, advice: str) -> None:
    assert not hasattr(gs, name)
    with pytest.raises(AttributeError) as caught:
        getattr(gs, name)
    assert str(caught.value) == f"module 'gradsync' has no attribute {name!r}: use {advice}"


def test_inspection_works_before_anything_is_initialised() -> None:
    assert not hasattr(gs, "WORLD")
    assert loaded_after("from gradsync import *; import gradsync, inspect, pydoc; inspect.getmembers(gradsync)")
    assert loaded_after("import gradsync, pydoc; pydoc.render_doc(gradsync)")
