import pytest

from gradsync import machine
from gradsync.errors import BackendUnavailable
from gradsync.machine import usable_cores


@pytest.fixture
def two_gpus(tmp_path):
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    return str(tmp_path)


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        (None, 2),
        ("", 0),
        ("-1", 0),
        ("0", 1),
        ("1,0", 2),
        ("0,-1,1", 1),
        ("GPU-8932f937", 1),
        ("NoDevFiles", 0),
    ],
)
def test_count_gpus(two_gpus, visible, count):
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert machine.count_gpus(environ, two_gpus) == count


def test_count_gpus_without_a_driver(tmp_path):
    assert machine.count_gpus({"CUDA_VISIBLE_DEVICES": "0,1"}, str(tmp_path)) == 0
    assert machine.count_gpus({}, str(tmp_path / "missing")) == 0


@pytest.mark.parametrize(("device_type", "gpus", "count"), [("auto", 3, 3), ("auto", 0, None), ("cpu", 3, None)])
def test_default_process_count(monkeypatch, device_type, gpus, count):
    monkeypatch.setattr(machine, "count_gpus", lambda: gpus)
    assert machine.default_process_count(device_type) == (count or usable_cores())


def test_default_process_count_needs_the_gpu_that_was_asked_for(monkeypatch):
    monkeypatch.setattr(machine, "count_gpus", lambda: 0)
    with pytest.raises(BackendUnavailable, match="found none"):
        machine.default_process_count("gpu")
