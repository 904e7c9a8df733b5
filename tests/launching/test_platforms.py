"""What docs/install.md says of other platforms, as far as Linux can tell: with what it alone has hidden."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent
EXAMPLES = HERE.parent.parent / "examples"


@pytest.fixture
def mac(cli):
    return lambda *words: cli.python(HERE / "without_linux.py", *words, environment={"GRADSYNC_BACKEND": "local"})


def test_one_rank_trains_on_macos(mac):
    assert mac(EXAMPLES / "own_loop.py") == (0, "1 ranks over local: weights [1. 2. 3.], bias [4.]\n", "")


def test_on_macos_every_public_name_loads_and_ranks_and_shared_memory_are_refused(mac, script):
    path = script(
        """
        import numpy as np, gradsync as gs
        def one(): return 1
        if __name__ == "__main__":
            print(len([getattr(gs, name) for name in gs.__all__]) == len(gs.__all__))
            for start in (
                lambda: gs.launch(one, nprocs=2),
                lambda: gs.spawn(one, nprocs=2),
                gs.launcher(one, n_gpus=2),
                lambda: gs.init_process_group("shm", rank=0, world_size=1),
            ):
                try:
                    start()
                except gs.BackendUnavailable as error:
                    print("Linux" in str(error) and "darwin" in str(error))
        """
    )
    assert mac(path) == (0, "True\n" * 5, "")


@pytest.mark.parametrize("has_pidfd", [True, False])  # Linux before 5.3 has none
def test_a_python_that_was_built_on_an_old_system_starts_ranks(has_pidfd, cli, script, tmp_path):
    """Pythons of conda and older ones of uv have not what the system has."""
    (tmp_path / "first").mkdir()
    script(
        f"""
        import errno, fcntl, os, signal
        del os.memfd_create, os.MFD_CLOEXEC, os.MFD_ALLOW_SEALING, fcntl.F_ADD_SEALS, signal.pidfd_send_signal
        def refuse(pid):
            raise OSError(errno.ENOSYS, "Function not implemented")
        if {has_pidfd}:
            del os.pidfd_open
        else:
            os.pidfd_open = refuse
        """,
        "first/sitecustomize.py",
    )
    path = script("import os, gradsync as gs\nwith gs.init_process_group('shm') as comm: os.write(1, b'joined\\n')")
    done = cli("run", "--no-prefix", "-n", 2, path, environment={"PYTHONPATH": str(tmp_path / "first")})
    assert done == (0, "joined\n" * 2, "")


def test_on_windows_the_first_use_says_what_to_do(cli):
    done = cli.python(
        "-c", "import sys; sys.platform = 'win32'; import gradsync as gs; print(gs.__version__); gs.launch"
    )
    assert done.code == 1
    assert done.err.splitlines()[-1].startswith("ImportError: ")
    assert "WSL 2" in done.err.splitlines()[-1]
