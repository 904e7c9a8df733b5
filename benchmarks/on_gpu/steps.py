"""A step of AllreduceCallback on gradients that are there, beside what DistributedDataParallel's reducer takes for it.

Alone on a GPU nothing has to travel, so what is timed is everything else: agreeing, packing, launching, splitting. That
is what the two have to be compared in; NCCL is the same for both. Two ranks on one GPU show only that a step is right.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import cupy

import gradsync as gs
from gradsync import process_group
from models import Shape
from on_gpu.clock import Operation, Sample, host_clock, take_turns
from on_gpu.hardware import versions
from on_gpu.rows import Row
from on_gpu.scale import Scale
from on_gpu.targets import DDP, DDP_VIEWS, GRADSYNC, SHARED, STEP

if TYPE_CHECKING:
    import torch

SHARING_RANKS = 2
_VARIANTS: dict[str, dict[str, bool]] = {DDP: {}, DDP_VIEWS: {"gradient_as_bucket_view": True}}

Samples = dict[str, list[Sample]]  # by contender


def measure_alone(scale: Scale) -> tuple[list[Row], dict[str, str]]:
    """Times steps of one rank, in a process of its own; returns the versions that it has loaded, too."""
    ((by_model, no_ddp, loaded),) = gs.launch(time_alone, scale, 1)
    rows = []
    for model, samples in by_model.items():
        rows += [Row.of(STEP, model, contender, of_contender) for contender, of_contender in samples.items()]
        if no_ddp is not None:
            rows += [Row(STEP, model, contender, no_ddp) for contender in _VARIANTS]
    return rows, loaded


def measure_shared(scale: Scale) -> list[Row]:
    """Times steps of two ranks on one GPU; a round counts with its slowest rank."""
    by_rank = gs.launch(time_shared, scale, SHARING_RANKS)
    rows = []
    for model in scale.models:
        rounds = zip(*[of_rank[model] for of_rank in by_rank], strict=True)
        samples = [max(round_, key=lambda sample: sample.seconds) for round_ in rounds]
        rows.append(Row.of(SHARED, model, f"{GRADSYNC}, {SHARING_RANKS} ranks on one GPU: right, not fast", samples))
    return rows


# -- In the ranks --------------------------------------------------------------------------------------------


def time_alone(scale: Scale) -> tuple[dict[str, Samples], str | None, dict[str, str]]:
    """Runs on the only rank. Returns the samples by model, why PyTorch does not take part, and loaded versions."""
    # Before CuPy loads NCCL: PyTorch was built against a certain one, CuPy takes what is there.
    no_ddp = why_no_ddp()
    with gs.init_process_group("nccl"), _pytorch_group(no_ddp), _that_packs() as communicator:
        samples = {
            model: _time_model(shapes, scale, communicator, with_ddp=no_ddp is None)
            for model, shapes in scale.models.items()
        }
        return samples, no_ddp, versions() | ({} if no_ddp else _pytorch_versions())


def _that_packs() -> gs.Communicator:
    """Returns a communicator of the same rank that packs although it is alone."""
    from gradsync.communicators.nccl.connect import connect

    client = process_group._client
    settings = process_group._settings
    assert client is not None
    assert settings is not None
    backend = connect(client, settings, "packing")
    backend.force_packing = True
    return gs.Communicator(backend)


def time_shared(scale: Scale) -> dict[str, list[Sample]]:
    """Runs on each rank. Returns the samples by model."""
    # Named, because on a machine with several GPUs each rank would take its own.
    with gs.init_process_group("nccl", device="cuda:0", allow_shared_gpu=True) as communicator:
        samples = {}
        for model, shapes in scale.models.items():
            gradients = _gradients(shapes, communicator.rank)
            step = {GRADSYNC: Operation(Step(gradients, communicator, scale.threshold_bytes))}
            taken = take_turns(step, host_clock, scale.shared_rounds, scale.warm_up, communicator.barrier)
            samples[model] = taken[GRADSYNC]
            # The first step gives all ranks the mean of their values, which later steps leave as it is.
            offset = (communicator.world_size - 1) / 2
            _check(gradients, offset, f"{communicator.label}: {model}")
        return samples


class Step:
    """A backward pass's synchronisation, up to every result in the caller's hands.

    Args:
        gradients: in the order of arrival.
        communicator: whose ranks take part.
        threshold_bytes: of a bucket.
    """

    def __init__(self, gradients: Sequence[Any], communicator: gs.Communicator, threshold_bytes: int) -> None:
        self._gradients = gradients
        self._callback = gs.AllreduceCallback("mean", communicator, threshold_bytes=threshold_bytes)

    def __call__(self) -> None:
        callback = self._callback
        with callback.backward():
            futures = [callback(number, gradient) for number, gradient in enumerate(self._gradients)]
        for future in futures:
            future.result()


def why_no_ddp() -> str | None:
    """Returns why DistributedDataParallel cannot take part, or None when it can; loads PyTorch."""
    try:
        import torch
    except ImportError:
        return "not installed"
    if not torch.cuda.is_available():
        return "PyTorch without CUDA"
    return None if torch.distributed.is_nccl_available() else "PyTorch without NCCL"


@contextlib.contextmanager
def _pytorch_group(no_ddp: str | None) -> Iterator[None]:
    """Surrounds the use of PyTorch's process group, met by the variables that gs.launch sets."""
    if no_ddp is not None:
        yield
        return
    import torch

    torch.distributed.init_process_group("nccl", device_id=torch.device("cuda", cupy.cuda.runtime.getDevice()))
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def _pytorch_versions() -> dict[str, str]:
    import torch

    return {"torch": str(torch.__version__), "nccl_of_torch": ".".join(map(str, torch.cuda.nccl.version()))}


def _time_model(shapes: Sequence[Shape], scale: Scale, communicator: gs.Communicator, *, with_ddp: bool) -> Samples:
    gradients = _gradients(shapes, 0)
    operations = {GRADSYNC: Operation(Step(gradients, communicator, scale.threshold_bytes))}
    passes = _ddp_passes(gradients) if with_ddp else {}
    for name, of_variant in passes.items():
        for title, synchronising in ((_whole(name), True), (_local(name), False)):
            forward, backward = of_variant.calls(synchronising=synchronising)
            operations[title] = Operation(backward, forward)
    samples = take_turns(operations, host_clock, scale.rounds, scale.warm_up)
    _check(gradients, 0, GRADSYNC)
    for name, of_variant in passes.items():
        for call in of_variant.calls(synchronising=True):
            call()
        _check([cupy.from_dlpack(gradient) for gradient in of_variant.gradients()], 0, name)
        samples[name] = list(map(_less, samples[_whole(name)], samples[_local(name)]))
    return samples


def _ddp_passes(gradients: Sequence[Any]) -> dict[str, Any]:
    import torch

    from peers.ddp import BackwardPasses

    tensors: list[torch.Tensor] = [torch.from_dlpack(gradient) for gradient in gradients]
    return {name: BackwardPasses(tensors, **options) for name, options in _VARIANTS.items()}


def _whole(name: str) -> str:
    return f"{name}: whole backward pass"


def _local(name: str) -> str:
    return f"{name}: backward pass in no_sync()"


def _less(whole: Sample, part: Sample) -> Sample:
    return Sample(whole.seconds - part.seconds, whole.host_seconds - part.host_seconds)


def _gradients(shapes: Sequence[Shape], offset: float) -> list[Any]:
    """Returns gradients in the order of arrival, filled with their number and an offset."""
    return [cupy.full(shape, 1 + number + offset, cupy.float32) for number, shape in enumerate(reversed(shapes))]


def _check(gradients: Sequence[Any], offset: float, who: str) -> None:
    cupy.cuda.runtime.deviceSynchronize()
    for number, gradient in enumerate(gradients):
        if not bool((gradient == 1 + number + offset).all()):
            raise RuntimeError(f"{who}: gradient {number} is not the mean of all ranks")
