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


def test_on_windows_the_first_use_says_what_to_do(cli):
    done = cli.python(
        "-c", "import sys; sys.platform = 'win32'; import gradsync as gs; print(gs.__version__); gs.launch"
    )
    assert done.code == 1
    assert done.err.splitlines()[-1].startswith("ImportError: ")
    assert "WSL 2" in done.err.splitlines()[-1]
