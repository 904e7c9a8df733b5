import os
import shutil
import subprocess
import sys
import textwrap

import pytest

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
