"""NVIDIA's driver, the GPUs, and the links between them."""

from __future__ import annotations

import re
from typing import Any

from gradsync.doctor.finding import Finding, ok, unusable, warning
from gradsync.doctor.surroundings import Surroundings
from gradsync.machine import count_gpus, visible_gpus

# As `nvidia-smi topo -m` marks them.
_LINKS = {
    "NV": "NVLink",
    "PIX": "one PCIe switch",
    "PXB": "PCIe switches",
    "PHB": "PCIe",
    "NODE": "PCIe",
    "SYS": "PCIe between sockets",
}


def check_driver(here: Surroundings) -> list[Finding]:
    """Whether the driver is there, and its version."""
    if not here.has_gpu:
        text = "no NVIDIA GPU shows itself: only the backend nccl needs one"
        advice = "a container sees GPUs with: docker run --gpus all" if here.has_nvidia_smi else ""
        return [unusable("driver", text, advice)]
    version = re.search(
        r"(?:Kernel Module|NVRM version).*?(\d+\.\d+(?:\.\d+)?)", here.read("/proc/driver/nvidia/version") or ""
    )
    driver = here.answers.get("cupy", {}).get("driver")
    text = version[1] if version else "it does not tell its version"
    if driver:
        text += f", good for CUDA up to {cuda_version(driver)}"
    return [ok("driver", text)]


def check_gpus(here: Surroundings) -> list[Finding]:
    """Which GPUs this process may use, and how they are linked."""
    if not here.has_gpu:
        return []
    visible = visible_gpus(here.environ)
    if visible == ():
        value = here.environ["CUDA_VISIBLE_DEVICES"]
        return [unusable("GPUs", f"CUDA_VISIBLE_DEVICES={value!r} hides all of them", "unset CUDA_VISIBLE_DEVICES")]
    count = count_gpus(here.environ, str(here.root / "dev"))
    devices: list[dict[str, Any]] = here.answers.get("cupy", {}).get("devices", [])
    if not devices:
        return [ok("GPUs", f"{count} by their device files; CuPy has to load to tell more")]
    names = sorted({device["name"] for device in devices})
    text = f"{len(devices)} x {', '.join(names)}, {devices[0]['memory_bytes'] / 1e9:.0f} GB; {_links(here, devices)}"
    if visible is not None and len(devices) < len(visible):
        text += f"; CUDA_VISIBLE_DEVICES={here.environ['CUDA_VISIBLE_DEVICES']} names {len(visible)}"
        return [warning("GPUs", text, "name GPUs that are there: nvidia-smi -L lists them")]
    if len(devices) > 1 and not all(len(device["peers"]) == len(devices) - 1 for device in devices):
        text += "; not all reach each other's memory, so that NCCL goes through the host's"
        return [
            warning("GPUs", text, "virtual machines: give all GPUs of one switch; check with: nvidia-smi topo -p2p r")
        ]
    return [ok("GPUs", text)]


def _links(here: Surroundings, devices: list[dict[str, Any]]) -> str:
    if len(devices) < 2:
        return "one alone"
    lines = here.answers.get("topology", {}).get("text", "").splitlines()
    words = {word for line in lines if re.match(r"\s*GPU\d+\s", line) for word in line.split()[1 : len(devices) + 1]}
    kinds = sorted({name for word in words for mark, name in _LINKS.items() if word.startswith(mark)})
    return f"linked by {' and '.join(kinds)}" if kinds else "nvidia-smi does not tell how they are linked"


def cuda_version(number: int) -> str:
    """Returns CUDA's version number as people write it: 12090 is 12.9."""
    return f"{number // 1000}.{number % 1000 // 10}"
