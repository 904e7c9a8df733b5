"""What Synchronised does beyond training: run on two ranks, with the Python that has torch, as torch_checks.py FOLDER.

pytest reads nothing but NAMES, in a Python that need not have it.
"""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import weakref
from typing import Any

from reported_checks import expect, names_of, run_all

NAMES = names_of(__file__)


def group() -> Any:
    """A communicator of all ranks, for a check that may break it."""
    return gs.new_group([0, 1])


def two_layers(**options: Any) -> Any:
    return nn.Sequential(nn.Linear(3, 4, **options), nn.Linear(4, 2, **options))


def loss_of(model: Any, comm: Any) -> Any:
    return (model(torch.full((2, 3), comm.rank + 1.0)) ** 2).sum()


def same_on_all_ranks(comm: Any, tensor: Any) -> bool:
    values = comm.all_gather(tensor.detach().float().reshape(1, -1).numpy())
    return bool((values[0] == values[1]).all())


def check_the_module_s_names_are_kept(comm: Any) -> None:
    torch.manual_seed(comm.rank)
    plain = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    names = list(plain.state_dict())
    model = Synchronised(plain)
    assert list(model.state_dict()) == names
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert next(model.parameters()) is plain[0].weight
    assert same_on_all_ranks(comm, plain[0].weight)
    assert model.module is plain
    model.eval()
    assert not plain.training
    assert not plain[1].training
    model.load_state_dict({name: torch.zeros_like(value) for name, value in plain.state_dict().items()})
    assert (plain[0].weight == 0).all()
    plain.note = "of the module"
    assert model.note == "of the module"
    expect(AttributeError, lambda: model.nothing)
    for of_it in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(of_it) is nn.Sequential
        assert list(of_it.state_dict()) == names
    assert model.unwrap() is plain
    loss_of(plain, comm).backward()  # no collective: the ranks' gradients differ
    assert plain[0].weight.grad is not None
    plain.append(nn.Linear(4, 2))
    loss_of(model, comm)  # without an error: the wrapper does not synchronise the new parameters, nor any other


def check_gradients_live_in_the_buckets(comm: Any) -> None:
    model = Synchronised(two_layers())
    places = []
    for set_to_none in (True, True, False):
        model.zero_grad(set_to_none=set_to_none)
        loss_of(model, comm).backward()
        places.append([parameter.grad.data_ptr() for parameter in model.parameters()])
    assert places == [places[0]] * 3
    assert max(places[0]) - min(places[0]) < 4096  # side by side, in one bucket


def check_half_precision(comm: Any) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.complex64):
        for views in (True, False):
            weight = nn.Parameter(torch.full((3,), 0.5, dtype=dtype))
            model = nn.Module()
            model.weight = weight
            Synchronised(model, gradient_as_bucket_view=views)
            (weight * (comm.rank + 1)).sum().abs().backward()
            assert weight.grad.dtype is dtype
            assert (weight.grad == 1.5).all(), weight.grad


def check_gradients_that_are_conjugates(comm: Any) -> None:
    for views in (True, False):
        model = nn.Module()
        model.weight = nn.Parameter(torch.ones(3, dtype=torch.complex64))
        Synchronised(model, gradient_as_bucket_view=views)
        for turn in (1, 2):  # the second finds a gradient to add to
            (model.weight.conj() * (comm.rank + 1) * 1j).real.sum().backward()
            torch.testing.assert_close(model.weight.grad, torch.full((3,), 1.5j * turn))


def check_errors_are_the_library_s(comm: Any) -> None:
    for views in (True, False):
        model = Synchronised(two_layers(), group(), gradient_as_bucket_view=views)
        head = model.module[1]
        only = model.module[0](torch.ones(2, 3)).sum()
        missing = "the backward pass made no gradient for 1.bias, 1.weight, on any rank"
        expect(gs.MissingGradient, only.backward, missing)
        part = model.module[0](torch.ones(2, 3)).sum() if comm.rank else loss_of(model, comm)
        expect(gs.PlanMismatch, part.backward, "1.bias")
        model.zero_grad()
        loss_of(model, comm).backward()  # all have had those errors: they can go on
        assert same_on_all_ranks(comm, head.weight.grad)


def check_an_exception_in_a_backward_pass_reaches_the_others(comm: Any) -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x * 1

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            raise KeyError("a mistake of the program")

    mine = group()
    model = Synchronised(two_layers(), mine, threshold_bytes=1)
    images = torch.ones(2, 3)
    hidden = model.module[0](images)
    if comm.rank == 1:
        hidden = Fails.apply(hidden)
    loss = model.module[1](hidden).sum()
    if comm.rank == 1:
        expect(KeyError, loss.backward, "a mistake of the program")
    else:
        error = expect(gs.RankFailed, loss.backward)
        assert error.rank == 1
    assert mine.closed
    comm.barrier()


def check_a_pass_after_one_that_was_left_by_an_exception(comm: Any) -> None:
    """A new pass, whatever still holds the old one: else nobody would end it, nor reduce what has come."""
    model = Synchronised(two_layers(), find_unused_parameters=True)
    layer = model.module[0]
    failing = layer.weight.register_hook(lambda gradient: 1 / 0)
    caught = []
    for _ in range(2):
        with model.no_sync():  # where nobody else has a part in it
            caught.append(expect(ZeroDivisionError, loss_of(model, comm).backward))
    failing.remove()
    model.zero_grad()
    layer(torch.full((2, 3), comm.rank + 1.0)).sum().backward()
    assert (layer.weight.grad == 3.0).all(), layer.weight.grad


def check_no_sync_keeps_gradients_local(comm: Any) -> None:
    model = Synchronised(two_layers())
    with model.no_sync():
        loss_of(model, comm).backward()
    assert not same_on_all_ranks(comm, model.module[0].weight.grad)
    loss_of(model, comm).backward()
    assert same_on_all_ranks(comm, model.module[0].weight.grad)
    model.zero_grad()
    if comm.rank == 0:  # other numbers of local passes are told
        with model.no_sync():
            loss_of(model, comm).backward()
    expect(gs.PlanMismatch, lambda: loss_of(model, comm).backward(), "local")


def check_gradients_that_no_rank_made_keep_what_they_had(comm: Any) -> None:
    """They are reduced already: a sum would count them once more for each rank."""
    model = Synchronised(two_layers(), op="sum", find_unused_parameters=True)
    first, last = model.module
    loss_of(model, comm).backward()
    before = last.weight.grad.clone()
    first(torch.ones(2, 3)).sum().backward()
    assert (last.weight.grad == before).all()
    model.zero_grad()
    with model.no_sync():
        last(torch.full((2, 4), comm.rank + 1.0)).sum().backward()
    first(torch.ones(2, 3)).sum().backward()  # what is left of the local pass goes with this one
    assert (last.weight.grad == 6.0).all(), last.weight.grad


def check_two_models_crosswise(comm: Any) -> None:
    """Models of equal parameters whose backward passes come in another order on one rank, or that have other names."""
    models = [Synchronised(two_layers(), comm), Synchronised(two_layers(), comm)]
    for _ in range(2):
        error = expect(
            gs.PlanMismatch, lambda: [loss_of(model, comm).backward() for model in models[:: -1 if comm.rank else 1]]
        )
        assert "the ranks use different callbacks here" in str(error)
        for model in models:
            model.zero_grad()
            loss_of(model, comm).backward()
            assert same_on_all_ranks(comm, model.module[0].weight.grad)
    expect(
        gs.PlanMismatch, lambda: Synchronised(two_layers(), comm, name=f"of rank {comm.rank}"), "callback 'of rank 1'"
    )


def check_uneven_batches(comm: Any) -> None:
    for batches in ([3, 1], [0, 2], [2, 2]):
        torch.manual_seed(comm.rank)
        model = Synchronised(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with model.join() as joined:
            for _ in range(batches[comm.rank]):
                optimizer.zero_grad()
                (model(torch.randn(5, 3)) ** 2).sum().backward()
                optimizer.step()
        assert joined.last_rank == batches.index(max(batches))
        for value in model.state_dict().values():
            assert same_on_all_ranks(comm, value)
    unused = Synchronised(two_layers(), find_unused_parameters=True)
    expect(gs.InvalidArgument, lambda: unused.join().__enter__(), "find_unused_parameters")


def check_knobs(comm: Any) -> None:
    model = Synchronised(two_layers(), clip_norm=1e-3, nonfinite="skip", op="sum")
    loss_of(model, comm).backward()
    norm = sum(float((parameter.grad.double() ** 2).sum()) for parameter in model.parameters()) ** 0.5
    assert abs(norm - 1e-3) < 1e-6
    assert not model.callback.skip_step
    (loss_of(model, comm) * (float("inf") if comm.rank else 1.0)).backward()
    assert model.callback.skip_step


def check_pytorch_s_own_scaling_and_clipping(comm: Any) -> None:
    model = Synchronised(two_layers())
    before = model.module[0].weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for is_finite in (False, True):
        optimizer.zero_grad()
        factor = 1.0 if is_finite or comm.rank == 0 else float("inf")
        scaler.scale(loss_of(model, comm) * factor).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        scaler.step(optimizer)
        scaler.update()
        if not is_finite:  # rank 1's overflow: skipped on both
            assert scaler.get_scale() == 2.0
            assert torch.equal(model.module[0].weight, before)
    assert not torch.equal(model.module[0].weight, before)
    assert same_on_all_ranks(comm, model.module[0].weight)


def check_a_hook_reduces_the_buckets(comm: Any) -> None:
    model = Synchronised(two_layers())
    model.callback.register_hook(gs.hooks.Int8Hook())
    for _ in range(2):
        model.zero_grad()
        loss_of(model, comm).backward()
        for parameter in model.parameters():
            assert same_on_all_ranks(comm, parameter.grad)
    assert float(model.module[0].weight.grad.abs().sum()) > 0


def check_evaluation_on_one_rank(comm: Any) -> None:
    model = Synchronised(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
    (model(torch.full((4, 3), comm.rank + 1.0) * torch.arange(4.0)[:, None]) ** 2).sum().backward()
    assert same_on_all_ranks(comm, model.module[1].running_mean)
    if comm.rank == 0:
        model.eval()
        with torch.no_grad():
            model(torch.ones(2, 3))
    assert same_on_all_ranks(comm, model.module[1].running_mean)


def check_a_buffer_that_a_graph_still_needs(comm: Any) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.register_buffer("scale", torch.ones(3))

        def forward(self, x: Any) -> Any:
            return (self.weight * self.scale * x).sum()

    model = Synchronised(Scaled())
    first, second = model(torch.ones(3)), model(torch.ones(3))
    first.backward()
    if comm.rank == 0:
        model.unwrap()
        second.backward()  # the values are its own
    else:
        expect(RuntimeError, second.backward, "modified by an inplace operation")


def check_parameters_that_come_later(comm: Any) -> None:
    for unused in (False, True):
        late = Synchronised(two_layers(), group(), find_unused_parameters=unused)
        loss_of(late, comm).backward()
        late.module[1] = nn.Linear(4, 2)
        error = "synchronise: 1.weight, 1.bias"
        expect(gs.InvalidArgument, lambda model=late: loss_of(model, comm), error)
        with torch.no_grad():
            loss_of(late, comm)  # an evaluation is nobody else's business
        expect(gs.InvalidArgument, loss_of(late.module, comm).backward, error)
        again = Synchronised(late.unwrap(), group(), find_unused_parameters=unused)
        loss_of(again, comm).backward()
        assert same_on_all_ranks(comm, again.module[1].weight.grad)
    whole = Synchronised(nn.Linear(3, 2), group())
    whole.weight = nn.Parameter(torch.ones(2, 3))
    expect(gs.InvalidArgument, lambda: loss_of(whole, comm), "synchronise: ")
    added = Synchronised(two_layers(), group())
    added.module.add_module("2", nn.Linear(2, 2))
    expect(gs.InvalidArgument, lambda: loss_of(added, comm), "synchronise: 2.weight, 2.bias")


def check_parts_that_need_no_gradient_may_come_later(comm: Any) -> None:
    model = Synchronised(two_layers(), find_unused_parameters=True)
    model.module[1] = nn.Identity()
    model.module[0].bias.requires_grad_(False)
    model.module.append(nn.Linear(4, 4).requires_grad_(False))
    loss_of(model, comm).backward()
    assert same_on_all_ranks(comm, model.module[0].weight.grad)
    model.module[2] = nn.Linear(4, 4)
    expect(gs.InvalidArgument, lambda: loss_of(model, comm), "synchronise: 2.weight, 2.bias")


def check_one_rank_s_late_parameter_is_told_to_the_others(comm: Any) -> None:
    mine = group()
    model = Synchronised(two_layers(), mine, find_unused_parameters=True)
    loss = loss_of(model, comm)
    if comm.rank == 1:
        model.module.append(nn.Linear(2, 2))
        expect(gs.InvalidArgument, loss.backward, "synchronise: 2.weight, 2.bias")
    else:
        assert expect(gs.RankFailed, loss.backward).rank == 1
    comm.barrier()


def check_what_is_dropped_is_collected(comm: Any) -> None:
    for views in (True, False):
        model = Synchronised(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), gradient_as_bucket_view=views)
        loss_of(model, comm).backward()
        parts = [weakref.ref(each) for each in (model, model.module, model.callback, model.module[0].weight)]
        weight = model.module[0].weight if views else None
        plain = model.module
        del model
        gc.collect()
        assert [part() is None for part in parts] == [True, False, False, False]
        plain.zero_grad()
        loss_of(plain, comm).backward()  # the module lives, and is synchronised
        assert same_on_all_ranks(comm, plain[0].weight.grad)
        if comm.rank == 1:
            plain[1].running_mean.fill_(7.0)
        loss_of(plain, comm).backward()
        assert same_on_all_ranks(comm, plain[1].running_mean)
        del plain
        gc.collect()
        assert [part() is None for part in parts] == [True, True, True, not views]
        if weight is not None:  # it outlives its module, which leaves nothing at it
            (weight * (comm.rank + 1)).sum().backward()
            assert not same_on_all_ranks(comm, weight.grad)


def check_a_module_whose_parts_refer_back_to_it_is_collected(comm: Any) -> None:
    plain = two_layers()
    plain[1].__dict__["owner"] = plain  # not a register, in which it would be a part of its part
    model = Synchronised(plain)
    loss_of(model, comm).backward()
    module = weakref.ref(plain)
    del model, plain
    gc.collect()
    assert module() is None


def check_tensors_in_the_place_of_parameters(comm: Any) -> None:
    """As torch.func has them: their gradients are the caller's."""
    model = Synchronised(two_layers())
    fresh = {name: each.detach().clone().requires_grad_() for name, each in model.named_parameters()}

    def called(module: Any) -> Any:
        return torch.func.functional_call(module, fresh, (torch.full((2, 3), comm.rank + 1.0),)).square().sum()

    error = expect(gs.InvalidArgument, lambda: called(model), "torch.func.functional_call")
    assert "model.module" in str(error)
    gradients = dict(zip(fresh, torch.autograd.grad(called(model.module), [*fresh.values()]), strict=True))
    gs.average_gradients(gradients)
    loss_of(model, comm).backward()  # the module has its own parameters again
    for name, parameter in model.named_parameters():
        assert (gradients[name] == parameter.grad).all(), name


def check_what_is_wrapped_again(comm: Any) -> None:
    """The last one reduces, and once: a sum shows it."""
    in_place = {"op": "sum", "gradient_as_bucket_view": False}
    held = Synchronised(two_layers(), **in_place)
    for module in (held.module, nn.Sequential(held.module)):
        Synchronised(module, **in_place)
        module.zero_grad()
        module(torch.ones(2, 3)).sum().backward()
        assert (held.module[1].bias.grad == 4.0).all()  # of two rows on two ranks
    held.unwrap()
    module.zero_grad()
    module(torch.ones(2, 3)).sum().backward()
    assert (held.module[1].bias.grad == 4.0).all()


def check_what_is_compiled(comm: Any) -> None:
    model = Synchronised(two_layers())
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    loss_of(compiled, comm).backward()
    assert same_on_all_ranks(comm, model.module[0].weight.grad)


def check_several_backward_passes_through_one_graph(comm: Any) -> None:
    model = Synchronised(two_layers())
    loss = loss_of(model, comm)
    loss.backward(retain_graph=True)
    once = model.module[0].weight.grad.clone()
    loss.backward()
    assert same_on_all_ranks(comm, model.module[0].weight.grad)
    torch.testing.assert_close(model.module[0].weight.grad, 2 * once)


def check_checkpointed_layers(comm: Any) -> None:
    from torch.utils.checkpoint import checkpoint

    for is_reentrant in (False, True):
        model = Synchronised(two_layers())
        images = torch.full((2, 3), comm.rank + 1.0, requires_grad=True)
        hidden = checkpoint(model.module[0], images, use_reentrant=is_reentrant)
        model.module[1](hidden).sum().backward()
        for parameter in model.parameters():
            assert same_on_all_ranks(comm, parameter.grad)


def check_nested_backward_passes_that_come_first_are_told(comm: Any) -> None:
    from torch.utils.checkpoint import checkpoint

    model = Synchronised(two_layers())
    hidden = torch.ones(2, 3, requires_grad=True)
    for layer in model.module:
        hidden = checkpoint(layer, hidden, use_reentrant=True)
    expect(gs.MissingGradient, hidden.sum().backward, "use_reentrant=False")


def check_a_module_that_hides_parameters(comm: Any) -> None:
    """A parameter that named_parameters() leaves out is not synchronised, and no error either."""

    class Hiding(nn.Linear):
        def named_parameters(self, *args: Any, **options: Any) -> Any:
            return ((name, each) for name, each in super().named_parameters(*args, **options) if name != "bias")

    model = Synchronised(Hiding(3, 2), group())
    loss_of(model, comm).backward()
    assert same_on_all_ranks(comm, model.weight.grad)
    assert not same_on_all_ranks(comm, model.bias.grad)


def check_what_is_refused(comm: Any) -> None:
    expect(gs.InvalidArgument, lambda: Synchronised([1]), "needs a torch.nn.Module, got list")
    expect(gs.InvalidArgument, lambda: Synchronised(nn.ReLU()), "no parameter needs a gradient")
    expect(gs.InvalidArgument, lambda: Synchronised(nn.Linear(2, 2, device="meta")), "is on meta")
    once = Synchronised(two_layers(), group())
    for again in (once, nn.Sequential(once)):
        expect(gs.InvalidArgument, lambda module=again: Synchronised(module), "synchronised already")
    other = nn.Linear(3, 2 + comm.rank)
    expect(gs.PlanMismatch, lambda: Synchronised(other), "weight: float32[3, 3]")
    model = Synchronised(two_layers(), group())
    model.double()
    expect(gs.InvalidArgument, (model(torch.ones(2, 3).double())).sum().backward, "when the module was wrapped")
    frozen = two_layers()
    frozen[0].bias.requires_grad_(False)
    model = Synchronised(frozen, group())
    loss_of(model, comm).backward()
    assert frozen[0].bias.grad is None
    frozen[0].bias.requires_grad_(True)
    expect(gs.InvalidArgument, lambda: loss_of(model, comm), "synchronise: 0.bias")
    expect(gs.InvalidArgument, loss_of(model.module, comm).backward, "synchronise: 0.bias")
    sparse = Synchronised(nn.Embedding(5, 2, sparse=True), group())
    expect(gs.InvalidArgument, sparse(torch.tensor([1])).sum().backward, "sparse=False")


if __name__ == "__main__":
    import torch
    from torch import nn

    import gradsync as gs
    from gradsync.adapters.torch import Synchronised

    torch.set_num_threads(1)
    with gs.init_process_group() as comm:
        run_all({name: globals()[name] for name in NAMES}, comm, sys.argv[1])
