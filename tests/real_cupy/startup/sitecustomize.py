"""Python runs this at its start, where the folder is on PYTHONPATH: `import cupy` then gives CuPy over host memory."""

import importlib.abc
import importlib.util
import os
import pathlib
import sys


class _CupyOverHostMemory(importlib.abc.MetaPathFinder):
    """Finds CuPy as Python would, and leads its calls to host memory once it is imported."""

    def find_spec(self, name, path=None, target=None):
        if name != "cupy":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            sys.path.insert(0, str(pathlib.Path(__file__).parent.parent.parent))
            try:
                from real_cupy import nccl_between_processes, redirect
            finally:
                del sys.path[0]
            redirect.install()
            nccl_between_processes.install()

        spec.loader.exec_module = exec_module
        return spec


if os.environ.get("HOST_CUDA_BUILD"):
    sys.meta_path.insert(0, _CupyOverHostMemory())
