"""Which GPU each rank gets, as the value of CUDA_VISIBLE_DEVICES in it: chosen before CUDA starts there."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from gradsync.arguments import integer_of
from gradsync.environment import ALLOW_SHARED_GPU
from gradsync.errors import InvalidArgument
from gradsync.machine import count_gpus, visible_gpus

# As CUDA_VISIBLE_DEVICES takes them: a number, a UUID or its beginning, a MIG instance in either notation.
_GPU = re.compile(r"\d+|GPU-[0-9a-fA-F-]+|MIG-[0-9a-fA-F-]+|MIG-GPU-[0-9a-fA-F-]+/\d+/\d+")


def parse_gpus(gpus: str | Sequence[int | str]) -> tuple[str, ...]:
    """Reads a list of GPUs: "4,5", [4, 5], "GPU-8932f937,MIG-GPU-8932f937/1/0".

    Args:
        gpus: numbers as CUDA counts all GPUs of the machine (by PCI address where CUDA_DEVICE_ORDER=PCI_BUS_ID),
            UUIDs or MIG instances.

    Returns:
        The GPUs, each as CUDA_VISIBLE_DEVICES takes it.

    Raises:
        InvalidArgument: it is empty, an entry is no GPU, or a GPU comes twice.
    """
    if not isinstance(gpus, str | Sequence) or isinstance(gpus, bytes):
        raise InvalidArgument(f'gpus needs to be text such as "0,1" or a list of GPUs, got {gpus!r}')
    names: list[str] = []
    for entry in gpus.split(",") if isinstance(gpus, str) else gpus:
        name = _name_of(entry, gpus)
        if name in names:
            raise InvalidArgument(
                f"gpus names GPU {name} twice: {gpus!r}; ranks share a GPU only "
                f"where {ALLOW_SHARED_GPU}=1 allows it, and then in turn: name each once"
            )
        names.append(name)
    if not names:
        raise InvalidArgument("gpus needs at least one GPU, got none")
    return tuple(names)


def choose_gpus(
    gpus: str | Sequence[int | str], n_ranks: int, environ: Mapping[str, str], *, allow_shared: bool = False
) -> list[str]:
    """Gives each rank of this machine its GPU.

    Args:
        gpus: the GPUs to use, see `parse_gpus`, in the order of the ranks.
        n_ranks: number of ranks.
        environ: the variables of this process; each GPU must be in its CUDA_VISIBLE_DEVICES, where that is set.
        allow_shared: whether ranks may share GPUs, in turn, where there are fewer than ranks.

    Returns:
        The value of CUDA_VISIBLE_DEVICES in each rank.

    Raises:
        InvalidArgument: too few or too many GPUs, or one that this process must not use or does not have.
    """
    names = parse_gpus(gpus)
    if len(names) > n_ranks or (len(names) < n_ranks and not allow_shared):
        raise InvalidArgument(
            f"gpus needs one GPU for each of {n_ranks} ranks, got {len(names)}: {','.join(names)}; "
            f"name {n_ranks} GPUs or start {len(names)} ranks"
        )
    for name in names:
        _check_visible(name, environ)
    return [names[rank % len(names)] for rank in range(n_ranks)]


def _name_of(entry: int | str, gpus: str | Sequence[int | str]) -> str:
    """Returns an entry as CUDA_VISIBLE_DEVICES takes it."""
    number = entry if isinstance(entry, str) else integer_of(entry)
    if number is None:
        raise InvalidArgument(f"gpus needs numbers or names of GPUs, got {entry!r} in {gpus!r}")
    text = str(number).strip()
    if not text:
        raise InvalidArgument(f"gpus has an empty entry: {gpus!r}")
    if not text.isascii() or not _GPU.fullmatch(text):
        raise InvalidArgument(f"gpus needs numbers from 0, GPU-... or MIG-... names, got {entry!r} in {gpus!r}")
    return str(int(text)) if text.isdigit() else text


def _check_visible(name: str, environ: Mapping[str, str]) -> None:
    """Refuses a GPU that this process has been denied, or that is not there."""
    visible = visible_gpus(environ)
    if visible is None:
        present = count_gpus({})
        if name.isdigit() and 0 < present <= int(name):
            raise InvalidArgument(f"gpus names GPU {name}, and this machine has GPUs 0 to {present - 1}")
        return
    if not any(_is_same(name, entry) for entry in visible):
        raise InvalidArgument(
            f"gpus names GPU {name}, which is not in this process's CUDA_VISIBLE_DEVICES="
            f"{environ['CUDA_VISIBLE_DEVICES']}; name GPUs as that variable does, or unset it"
        )


def _is_same(name: str, entry: str) -> bool:
    """Tells whether two entries are one GPU, as far as their text shows it."""
    if entry.isdigit() or name.isdigit():
        return entry.isdigit() and name.isdigit() and int(entry) == int(name)
    # CUDA takes the beginning of a UUID for the whole.
    return entry.startswith(name) or name.startswith(entry)
