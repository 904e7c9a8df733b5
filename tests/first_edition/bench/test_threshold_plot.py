"""The picture of a sweep, where matplotlib is there, and a word where it is not."""

import pytest

import gradsync as gs
from gradsync.bench.measurement import Seconds
from gradsync.bench.picture import check_plotting
from gradsync.bench.text import MEGABYTE
from gradsync.bench.threshold_plot import plot
from gradsync.bench.thresholds import Contender, Row


def test_without_matplotlib_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(gs.BackendUnavailable, match=r"pip install 'gradsync\[plot\]'"):
        check_plotting()


@pytest.mark.parametrize("packs", [Seconds(0.02, 0.01, 0.03, 5), None])
def test_a_picture_is_written(tmp_path, packs):
    pytest.importorskip("matplotlib")
    rows = [Row(Contender(size * MEGABYTE, 3), Seconds(0.02, 0.01, 0.03, 5), packs, 1e9) for size in (1, 10)]
    check_plotting()
    plot(rows, "resnet50: 2 ranks over shm", tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
