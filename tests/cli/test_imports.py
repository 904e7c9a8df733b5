"""Imports go down only (the contracts in pyproject.toml), and importing gradsync costs next to nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_order_of_the_rooms(cli):
    """In a process of its own: import-linter disables the loggers that there are."""
    program = "from importlinter.cli import lint_imports; raise SystemExit(lint_imports(no_cache=True))"
    done = cli.python("-c", program, cwd=ROOT)
    assert done.code == 0, done.out


@pytest.mark.parametrize(
    ("statement", "heavy"),
    [
        ("import gradsync", {"cupy", "multiprocessing", "msgpack", "numpy", "click", "rich"}),
        # A process takes one backend, and one rank meets nobody.
        (
            "from gradsync import AllreduceCallback, bcast_list_, init_process_group",
            {"cupy", "mpi4py", "msgpack", "socket", "pathlib", "numpy.typing", "_hashlib"},
        ),
        (
            "import gradsync as gs; gs.init_process_group('local'); gs.AllreduceCallback",
            {"cupy", "mpi4py", "multiprocessing", "click", "rich"},
        ),
    ],
)
def test_only_what_is_needed_is_loaded(cli, statement, heavy):
    done = cli.python("-c", f"import sys; {statement}; print(' '.join(sys.modules))")
    assert done.code == 0, done.err
    loaded = set(done.out.split())
    assert "gradsync" in loaded
    assert not loaded & heavy


@pytest.mark.parametrize(
    "program",
    [
        "from gradsync import *; import gradsync, inspect; inspect.getmembers(gradsync)",
        "import gradsync, pydoc; pydoc.render_doc(gradsync)",
        # As tools do that import every module; where mpi4py is missing, that of MPI says so.
        "import gradsync, pkgutil, importlib\n"
        "for each in pkgutil.walk_packages(gradsync.__path__, 'gradsync.', onerror=lambda _: None):\n"
        "    if not each.name.endswith('__main__'):\n"
        "        try: importlib.import_module(each.name)\n"
        "        except ImportError as error: print(error)",
    ],
)
def test_tools_that_look_at_everything_work(cli, program):
    done = cli.python("-c", program)
    assert (done.code, done.err) == (0, "")
