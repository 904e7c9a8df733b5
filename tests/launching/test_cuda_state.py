"""CUDA in the process that starts ranks: forked ranks could not use it."""

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
        import gradsync as gs
        from gradsync.launching.launch import cuda_is_initialised
        assert not cuda_is_initialised()
        assert "elsewhere.so" not in open("/proc/self/maps").read()
        library = ctypes.CDLL({str(library)!r})
        gs.set_start_method("fork")
        assert gs.launch(int, "5", 1) == [5]
        library.cuInit(0)
        for start, arguments in ((gs.launch, ("5",)), (gs.launcher, ()), (gs.spawn, (("5",),))):
            try:
                started = start(int, *arguments, 1)
                started("5")  # by the launcher
            except gs.InvalidArgument as error:
                print(error)
        gs.set_start_method("spawn")
        assert gs.launch(int, "5", 1) == [5]
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source)],
        check=True,
        env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.stdout.splitlines() == [
        f"{who} cannot fork ranks: CUDA is initialised in this process, and forked ranks could not use it; "
        "do not use CUDA before the fork, or use start method 'spawn'"
        for who in ("launch", "launcher", "spawn")
    ]


@pytest.mark.gpu
def test_a_real_driver_tells_the_same():
    source = """
        import ctypes, os
        from gradsync.launching.launch import cuda_is_initialised
        driver = ctypes.CDLL("libcuda.so.1")
        assert not cuda_is_initialised()
        assert driver.cuInit(0) == 0
        assert cuda_is_initialised()
        child = os.fork()
        if child == 0:
            os._exit(driver.cuInit(0))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3  # what the refusal to fork is about
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(source)], check=True)
