import os
import shutil
import subprocess
import sys
import textwrap

import pytest

from gradsync.errors import InvalidArgument
from gradsync.launching import function_call
from gradsync.launching.function_call import check_cuda_untouched, devices_in_use

FAKE_LIBRARY = """
static int initialised;
int cuInit(unsigned int flags) { initialised = 1; return 0; }
int cuDeviceGetCount(int *count) { *count = 2; return initialised ? 0 : 3; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuDevicePrimaryCtxGetState(int device, unsigned int *flags, int *active) { *active = device == 1; return 0; }
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler for a library in libcuda's place")
def test_the_library_is_asked_only_if_it_is_loaded(tmp_path):
    library = tmp_path / "elsewhere.so"
    (tmp_path / "fake.c").write_text(FAKE_LIBRARY)
    build = ["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(library), str(tmp_path / "fake.c")]
    subprocess.run(build, check=True, capture_output=True)
    (tmp_path / "libcuda.so.1").symlink_to(library)  # it could be found
    source = f"""
        import ctypes
        from gradsync.launching.function_call import devices_in_use
        assert devices_in_use() is None
        assert "elsewhere.so" not in open("/proc/self/maps").read()
        library = ctypes.CDLL({str(library)!r})
        assert devices_in_use() is None
        library.cuInit(0)
        assert devices_in_use() == [1], devices_in_use()
    """
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source)],
        check=True,
        env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)},
    )


@pytest.mark.gpu
def test_a_real_driver_tells_the_same():
    source = """
        import ctypes, os
        from gradsync.launching.function_call import devices_in_use
        driver = ctypes.CDLL("libcuda.so.1")
        assert devices_in_use() is None
        assert driver.cuInit(0) == 0
        assert devices_in_use() == [], devices_in_use()
        child = os.fork()
        if child == 0:
            os._exit(driver.cuInit(0))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3  # what the refusal to fork is about
        context = ctypes.c_void_p()
        assert driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
        assert devices_in_use() == [0], devices_in_use()
        assert driver.cuDevicePrimaryCtxRelease_v2(0) == 0
        assert devices_in_use() == [], devices_in_use()
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(source)], check=True)


NOT_INITIALIZED = 3
INVALID_DEVICE = 101


class Driver:
    """As much of libcuda as is asked: the contexts by device, or None before cuInit."""

    def __init__(self, active):
        self.active = active

    def cuDeviceGetCount(self, count):  # noqa: N802
        if self.active is None:
            return NOT_INITIALIZED
        count._obj.value = len(self.active)
        return 0

    def cuDeviceGet(self, device, ordinal):  # noqa: N802
        device._obj.value = 100 + ordinal  # a handle is no ordinal
        return 0

    def cuDevicePrimaryCtxGetState(self, device, flags, active):  # noqa: N802
        if not 100 <= device.value < 100 + len(self.active):
            return INVALID_DEVICE
        active._obj.value = self.active[device.value - 100]
        return 0


@pytest.fixture
def load_driver(monkeypatch):
    function_call._warn_once.cache_clear()
    return lambda active: monkeypatch.setattr(function_call, "_loaded_driver", lambda: Driver(active))


@pytest.mark.parametrize(
    ("active", "devices"),
    [(None, None), ([], []), ([0, 0], []), ([1, 0], [0]), ([0, 1], [1]), ([1, 0, 1], [0, 2])],
)
def test_what_cuda_has_begun(load_driver, active, devices):
    load_driver(active)
    assert devices_in_use() == devices


@pytest.mark.parametrize(("active", "where"), [([0], "the driver"), ([1], "device 0"), ([1, 0, 1], "devices 0, 2")])
def test_no_fork_once_cuda_is_initialised(load_driver, active, where):
    load_driver(active)
    with pytest.raises(InvalidArgument) as caught:
        check_cuda_untouched("spawn", "fork")
    assert str(caught.value) == (
        f"spawn cannot fork ranks: CUDA is initialised in this process ({where}), and forked ranks could not use it; "
        "keep CUDA out of the parent before forking, or use start method 'spawn'"
    )


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_memory_that_this_process_holds_gives_one_warning(load_driver, method):
    load_driver([0, 1])
    with pytest.warns(
        RuntimeWarning, match=r"launcher: this process itself uses CUDA \(device 1\) and holds GPU memory"
    ):
        check_cuda_untouched("launcher", method)
    check_cuda_untouched("launcher", method)


@pytest.mark.parametrize(("active", "method"), [(None, "fork"), (None, "spawn"), ([0], "spawn"), ([0], "forkserver")])
def test_nothing_is_said_where_it_does_no_harm(load_driver, active, method):
    load_driver(active)
    check_cuda_untouched("launch", method)
