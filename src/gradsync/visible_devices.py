"""How many ranks this machine has room for, found without touching CUDA in the launcher."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from gradsync.cores import usable_cores
from gradsync.errors import BackendUnavailable


def count_gpus(environ: Mapping[str, str] = os.environ, device_folder: str = "/dev") -> int:
    """Counts the NVIDIA GPUs that a process started from here may use.

    Args:
        environ: the variables; CUDA_VISIBLE_DEVICES limits the count.
        device_folder: where the driver puts its device files.
    """
    try:
        present = sum(bool(re.fullmatch(r"nvidia\d+", name)) for name in os.listdir(device_folder))
    except OSError:
        present = 0
    visible = visible_gpus(environ)
    return present if visible is None or present == 0 else len(visible)


def visible_gpus(environ: Mapping[str, str]) -> tuple[str, ...] | None:
    """Returns the GPUs that CUDA_VISIBLE_DEVICES names, or None where it is not set."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return None
    names = []
    for entry in map(str.strip, visible.split(",")):
        # CUDA stops at the first entry that is no device.
        if entry in ("", "-1", "NoDevFiles"):
            break
        names.append(entry)
    return tuple(names)


def default_process_count(device_type: str = "auto") -> int:
    """Gives one process per visible GPU, or per usable core where there is no GPU.

    Args:
        device_type: "auto", "cpu" (cores) or "gpu".

    Raises:
        BackendUnavailable: "gpu", and there is none.
    """
    gpus = 0 if device_type == "cpu" else count_gpus()
    if device_type == "gpu" and gpus == 0:
        raise BackendUnavailable("device_type 'gpu' needs a visible NVIDIA GPU, found none")
    return gpus or usable_cores()
