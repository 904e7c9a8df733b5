"""The C extension; all else is in pyproject.toml. Where it cannot be built, shared memory runs on plain NumPy."""

import sys
import sysconfig

from setuptools import Extension, setup

# No -ffast-math, and no fused multiply-add: the results are those of plain.py, bit for bit.
FLAGS = ["-std=c11", "-O3", "-ffp-contract=off", "-fno-math-errno"]
FREE_THREADED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))  # it has no stable ABI yet

setup(
    ext_modules=[
        Extension(
            "gradsync.communicators.shared_memory._kernels",
            ["src/gradsync/communicators/shared_memory/_kernels.c"],
            extra_compile_args=FLAGS,
            define_macros=[] if FREE_THREADED else [("Py_LIMITED_API", "0x030B0000")],
            py_limited_api=not FREE_THREADED,
            optional=True,
        )
    ]
    if sys.platform == "linux"
    else [],
    options={} if FREE_THREADED else {"bdist_wheel": {"py_limited_api": "cp311"}},
)
