"""The C extension; all else is in pyproject.toml. Where it cannot be built, shared memory runs on plain NumPy."""

import os
import subprocess
import sys
import sysconfig

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

# No -ffast-math, and no fused multiply-add: the bits are those of plain.py, but of complex products and norms.
FLAGS = ["-std=c11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-strict-aliasing"]
BASELINE = "-march=x86-64-v2"  # as NumPy's; compilers for other processors do not know it, nor do old ones
FREE_THREADED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))  # before Python 3.15 it has no stable ABI


class BuildKernels(build_ext):
    def build_extension(self, extension):
        command = [*self.compiler.compiler_so, BASELINE, "-x", "c", "-E", os.devnull]
        try:
            knows_baseline = subprocess.run(command, capture_output=True).returncode == 0
        except OSError:  # no compiler
            knows_baseline = False
        if knows_baseline:
            extension.extra_compile_args.append(BASELINE)
        super().build_extension(extension)


setup(
    cmdclass={"build_ext": BuildKernels},
    ext_modules=[
        Extension(
            "gradsync.communicators.shared_memory._kernels",
            ["src/gradsync/communicators/shared_memory/_kernels.c"],
            depends=["setup.py"],  # its flags
            extra_compile_args=FLAGS,
            define_macros=[] if FREE_THREADED else [("Py_LIMITED_API", "0x030B0000")],
            py_limited_api=not FREE_THREADED,
            # CI, and who builds wheels for others, set this: no wheel without the kernels.
            optional=os.environ.get("REQUIRE_KERNELS") != "1",
        )
    ]
    if sys.platform == "linux"
    else [],
    options={} if FREE_THREADED else {"bdist_wheel": {"py_limited_api": "cp311"}},
)
