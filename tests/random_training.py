"""Draws training programs by seed, runs them, and compares their numbers with a plain NumPy model of what they mean.

Most programs are right on all ranks: then every number must be, bit for bit. In the others one rank differs at a drawn
place, as a user's mistake would have it: then the ranks concerned must end with a typed error. A wrong number in
silence, a rank that hangs, or an error of another type is a violation, and is printed with the seed and the program.

    python tests/random_training.py --programs 2000
    python tests/random_training.py --seed 17 --programs 1 --backend shm --ranks 3 --show
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from queue import SimpleQueue
from random import Random
from typing import Any, ClassVar

import numpy as np

from program_ranks import Ending, ProgramRanks

Host = np.ndarray[Any, Any]

#: Each rank's program begins with this. The model takes `values` from it.
PRELUDE = '''
import zlib

import numpy as np



def values(what, shape, dtype="float32", rank=None):
    """Numbers that differ by rank and by name: small multiples of 1/8, so that sums are exact in any order."""
    first = zlib.crc32(f"{what} of rank {RANK if rank is None else rank}".encode())
    numbers = (first + 37 * np.arange(int(np.prod(shape)))) % 211 - 105
    return (numbers / (1 if dtype == "int32" else 8)).astype(dtype).reshape(shape)


def added(*passes):
    total = passes[0].copy()
    for each in passes[1:]:
        total += each
    return total


def strided(array):
    apart = np.zeros((*array.shape, 2), array.dtype)[..., 1]
    apart[...] = array
    return apart


def fortran(array):
    return np.asfortranarray(array) if array.ndim > 1 else array


def read_only(array):
    array.setflags(write=False)
    return array


def host(array):
    return array.get() if hasattr(array, "get") else np.array(array)


seen, kept = [], {}
'''
_prelude: dict[str, Any] = {"RANK": 0}
exec(PRELUDE, _prelude)
values = _prelude["values"]

SHAPES = [(), (0, 3), (1,), (7,), (3, 5), (2, 1, 4), (40,), (33, 3)]
AWKWARD = {(), (0, 3), (2, 1, 4)}
OTHER_DTYPE = {"float32": "float64", "float64": "float32", "float16": "float32", "int32": "int64"}
HUGE_THRESHOLD = 10 * 1024**2

#: Disagreements after which the ranks concerned end with a typed error, but for the last one, which only warns.
PLANTS = (
    "crosswise",
    "order swapped",
    "different shape",
    "different dtype",
    "gradient left out",
    "one step less",
    "write in flight",
    "collective in a done-callback",
    "different op",
    "different name",
    "world against group",
    "two communicators crosswise",
    "never flushed",
    "rank raises",
    "parameters not broadcast",
)
#: PlanMismatch on all ranks of a step that a program may leave out, and go on.
CAUGHT_BY_ALL = (
    "order swapped",
    "different shape",
    "different dtype",
    "gradient left out",
    "different op",
)
#: What a program may have beside another disagreement, and before it.
SURVIVABLE = (*CAUGHT_BY_ALL, "write in flight", "parameters not broadcast")
#: Found at the deadline only, so theirs is short.
AT_THE_DEADLINE = ("world against group", "two communicators crosswise")
#: Those that make sense for one rank.
ALONE = (
    "write in flight",
    "collective in a done-callback",
    "never flushed",
    "rank raises",
)
PLANTED_SHARE = 0.6
#: How often those beside another are tried first; some find a place more often than others.
_EXTRA_WEIGHTS = dict.fromkeys(CAUGHT_BY_ALL, 2.0) | {"write in flight": 0.3}
_EXTRA_WEIGHTS |= {"order swapped": 3.0, "different op": 9.0, "parameters not broadcast": 2.0}
_WEIGHTS = dict.fromkeys(SURVIVABLE, 0.2) | {"different op": 0.7}

#: What programs are made of, for the table.
CONSTRUCTS = (
    "two callbacks",
    "three callbacks",
    "twin callbacks",
    "name=",
    "parameters=",
    "parameters= as arrays",
    "several buckets",
    "gradient_as_bucket_view",
    'missing="zero"',
    "new_group or split",
    "own accumulation",
    "average_gradients",
    "bcast_list_",
    "plain collectives",
    "asynchronous collectives",
    "done-callbacks",
    "callback made every epoch",
    "callback on rank 0 only",
    "changed before hand-over",
    "results kept",
    "recurring arrays",
    "fresh arrays",
    "odd layouts",
    "float64",
    "int32",
    "float16",
    "awkward shapes",
    "order by rank",
    "two callbacks interleaved",
    "flush() without a block",
)


# ---------------------------------------------------------------------------------------------------- what is drawn


@dataclass(frozen=True)
class Group:
    """A communicator: its variable, how each rank makes it, and its members, as each rank sees them."""

    label: str
    made: tuple[str, ...]
    members: tuple[tuple[int, ...], ...]

    def of(self, rank: int) -> tuple[int, ...]:
        return self.members[rank]


@dataclass
class Callback:
    """A callback: what it is made with, and what it is handed over."""

    label: str
    group: Group
    op: str
    specs: dict[str, tuple[tuple[int, ...], str]]
    threshold_bytes: int
    name: str | None
    parameters: str | None  # None, "specs" or "arrays"
    is_zero: bool
    is_view: bool
    has_buffers: bool
    is_recurring: bool
    layout: str
    has_block: bool
    epoch_steps: int  # made anew after so many steps; 0: never

    def made(self, rank: int, plants: Sequence[Plant]) -> list[str]:
        op, name = self.op, self.name
        for plant in plants:
            if plant.rank == rank and plant.target == self.label:
                op = {"sum": "mean", "mean": "sum"}[op] if plant.kind == "different op" else op
                name = "another" if plant.kind == "different name" else name
        options = [repr(op), self.group.label, f"threshold_bytes={self.threshold_bytes}"]
        if name is not None:
            options.append(f"name={name!r}")
        if self.parameters == "specs":
            options.append(f"parameters={self.specs!r}")
        elif self.parameters == "arrays":
            options.append(f"parameters=[{', '.join(f'{self.label}_{each}_parameter' for each in self.specs)}]")
        if self.is_zero:
            options.append('missing="zero"')
        if self.is_view:
            options.append("gradient_as_bucket_view=True")
        lines = [f"{self.label} = gs.AllreduceCallback({', '.join(options)})"]
        if self.has_buffers:
            lines.append(f"{self.label}_buffers = {self.label}.gradient_buffers()")
            lines += [f"{self.variable(each)} = {self.label}_buffers[{each!r}]" for each in self.specs]
        return lines

    def variable(self, name: str) -> str:
        return f"{self.label}_{name}"

    def parameter(self, name: str) -> str:
        return f"{self.label}_{name}_parameter" if self.parameters == "arrays" else repr(name)


@dataclass
class Plant:
    """A disagreement: its kind, the rank that differs, and where."""

    kind: str
    rank: int
    event: int = -1
    target: str = ""
    detail: Any = None
    survives: bool = False


@dataclass
class Event:
    """Something that all members of a group do."""

    group: Group
    number: int = field(default=-1, init=False)
    constructs: ClassVar[tuple[str, ...]] = ()

    def lines(self, rank: int, program: Program) -> list[str]:
        """Returns the statements of a member."""
        raise NotImplementedError

    def means(self, rank: int) -> dict[str, Any]:
        """Returns what a member must note: the model."""
        return {}

    def each(self, rank: int, what: str, shape: tuple[int, ...], dtype: str) -> list[Host]:
        """Returns the arrays of all members."""
        return [values(what, shape, dtype, member) for member in self.group.of(rank)]


def reduced(arrays: Sequence[Host], op: str) -> Host:
    """The model of a reduction: added up exactly, divided once, in float32 or wider, and rounded once."""
    if op in ("max", "min"):
        return getattr(np, op)(np.stack(arrays), axis=0)
    dtype = arrays[0].dtype
    wide = np.dtype(np.float32) if dtype == np.float16 else dtype
    total = np.stack(arrays).astype(wide).sum(axis=0, dtype=wide)
    if op == "mean":
        total = total / wide.type(len(arrays))
    return np.asarray(total).astype(dtype)


@dataclass
class Pass(Event):
    """A backward pass of one callback."""

    callback: Callback
    orders: list[list[str]]  # by rank: what it hands over
    passes: int = 1
    is_changed: bool = False
    has_done_callback: bool = False
    is_kept: bool = False

    def tag(self, name: str) -> str:
        return f"{self.number} {self.callback.label}.{name}"

    def specs_handed_over(self) -> list[str]:
        return list(self.callback.specs) if self.callback.is_zero else self.orders[0]

    def prepared(self, rank: int, program: Program) -> list[str]:
        """Returns the statements that make the gradients."""
        callback, lines = self.callback, []
        mistake = program.plant_at(self.number, rank)
        for name in self.orders[rank]:
            shape, dtype = callback.specs[name]
            is_other = False
            if mistake is not None and mistake.detail == name:
                if mistake.kind == "different dtype":
                    dtype, is_other = OTHER_DTYPE[dtype], True
                elif mistake.kind == "different shape":
                    shape, is_other = other_shape(shape), True
            calls = [f"values({self.tag(name) + f' pass {i}'!r}, {shape}, {dtype!r})" for i in range(self.passes)]
            array = calls[0] if len(calls) == 1 else f"added({', '.join(calls)})"
            if is_other:
                lines.append(f"{callback.variable(name)}_other = {program.put(array)}")
            elif callback.is_recurring:
                lines.append(f"{callback.variable(name)}[...] = {program.put(array)}")
            else:
                array = f"{callback.layout}({array})" if callback.layout else array
                lines.append(f"{callback.variable(name)} = {program.put(array)}")
            if self.is_changed and not is_other:
                lines.append(f"{callback.variable(name)} += 1")
        return lines

    def handed_over(self, rank: int, program: Program) -> list[list[str]]:
        """Returns the statements that hand over, gradient by gradient."""
        callback, steps = self.callback, []
        mistake = program.plant_at(self.number, rank)
        names = list(self.orders[rank])
        if mistake is not None and mistake.kind == "order swapped":
            at = names.index(mistake.detail)
            names[at], names[at + 1] = names[at + 1], names[at]
        for name in names:
            is_meant = mistake is not None and mistake.detail == name
            if is_meant and mistake.kind == "gradient left out":
                continue
            array = callback.variable(name)
            if is_meant and mistake.kind in ("different shape", "different dtype"):
                array += "_other"
            future = f"{callback.variable(name)}_future"
            lines = [f"{future} = {callback.label}({callback.parameter(name)}, {array})"]
            if self.has_done_callback:
                lines.append(f"{future}.add_done_callback(lambda _: seen.append({self.tag(name)!r}))")
            if is_meant and mistake.kind == "collective in a done-callback":
                lines.append(f"{future}.add_done_callback(lambda _: {callback.group.label}.all_reduce(np.zeros(3)))")
            if is_meant and mistake.kind == "write in flight":
                # Where it is done by now, it may have been so before: then the result is the program's to change.
                write = [f"{array} += 1", f"note({'wrote ' + self.tag(name)!r}, {future}.done())"]
                lines += refused(write) if mistake.survives else write
            if is_meant and mistake.kind == "rank raises":
                lines.append('raise RuntimeError("planted")')
            steps.append(lines)
        return steps

    def noted(self, rank: int) -> list[str]:
        callback, lines = self.callback, []
        for name in self.orders[rank]:
            future = f"{callback.variable(name)}_future"
            lines.append(f"note({self.tag(name)!r}, host({future}.result()))")
            if self.is_kept:
                lines.append(f"kept[{self.tag(name)!r}] = {future}.result()")
        if callback.is_zero:
            missing = [name for name in callback.specs if name not in self.orders[rank]]
            lines += [f"note({self.tag(name)!r}, host({callback.label}.filled[{name!r}]))" for name in missing]
        return lines

    def lines(self, rank: int, program: Program) -> list[str]:
        label = self.callback.label
        mistake = program.plant_at(self.number, rank)
        inside = [line for lines in self.handed_over(rank, program) for line in lines]
        lines = self.prepared(rank, program)
        if mistake is not None and mistake.kind == "never flushed":
            return lines + inside
        if self.callback.has_block:
            lines += [f"with {label}.backward():", *indented(inside or ["pass"])]
        else:
            lines += [*inside, f"{label}.flush()"]
        return lines + self.noted(rank)

    def means(self, rank: int) -> dict[str, Any]:
        found = {}
        for name in self.specs_handed_over():
            shape, dtype = self.callback.specs[name]
            arrays = []
            for member in self.group.of(rank):
                total = np.zeros(shape, dtype)
                if name in self.orders[member]:
                    for i in range(self.passes):
                        total += values(f"{self.tag(name)} pass {i}", shape, dtype, member)
                    total += self.is_changed
                arrays.append(total)
            found[self.tag(name)] = reduced(arrays, self.callback.op)
        return found


@dataclass
class Interleaved(Event):
    """Backward passes of two callbacks at once."""

    one: Pass
    two: Pass
    constructs: ClassVar = ("two callbacks interleaved",)

    def lines(self, rank: int, program: Program) -> list[str]:
        both = (self.one, self.two)
        lines = [line for each in both for line in each.prepared(rank, program)]
        lines.append(f"with {self.one.callback.label}.backward(), {self.two.callback.label}.backward():")
        steps = [each.handed_over(rank, program) for each in both]
        for i in range(max(map(len, steps))):
            for each in steps:
                lines += indented(each[i]) if i < len(each) else []
        return lines + [line for each in both for line in each.noted(rank)]

    def means(self, rank: int) -> dict[str, Any]:
        return self.one.means(rank) | self.two.means(rank)


@dataclass
class Collective(Event):
    """A plain collective, or the beginning of an asynchronous one."""

    kind: str
    op: str
    root: int  # in the group's numbering
    length: int
    dtype: str
    is_asynchronous: bool = False

    def lines(self, rank: int, program: Program) -> list[str]:
        mistake = program.plant_at(self.number, rank)
        op, group = self.op, self.group.label
        if mistake is not None and mistake.kind == "different op":
            op = mistake.detail
        if mistake is not None and mistake.kind == "world against group":
            group = mistake.detail
        count = len(self.group.of(rank))
        on = group + (".asynchronous" if self.is_asynchronous else "")
        shape = (self.length * count,) if self.kind in ("reduce_scatter", "all_to_all") else (self.length,)
        array = f"x{self.number}"
        lines = [f"{array} = {program.put(f'values({str(self.number)!r}, {shape}, {self.dtype!r})')}"]
        call = {
            "all_reduce": f"{on}.all_reduce({array}, {op!r})",
            "broadcast": f"{on}.broadcast({array}, {self.root % count})",
            "all_gather": f"{on}.all_gather({array})",
            "reduce_scatter": f"{on}.reduce_scatter({array}, {op!r})",
            "all_to_all": f"{on}.all_to_all({array})",
            "barrier": f"{on}.barrier()",
            "objects": f"{group}.objects.all_gather(({str(self.number)!r}, RANK))",
        }[self.kind]
        if self.kind == "barrier":
            return [call] if not self.is_asynchronous else [f"x{self.number}_future = {call}"]
        if self.kind == "objects":
            return [f"note('{self.number}', {call})"]
        if self.is_asynchronous:
            return [*lines, f"x{self.number}_future = {call}"]
        return [*lines, f"note('{self.number}', host({call}))"]

    def value(self, rank: int) -> Any:
        members = self.group.of(rank)
        count, at, what = len(members), members.index(rank), str(self.number)
        whole = self.each(rank, what, (self.length * count,), self.dtype)
        part = self.each(rank, what, (self.length,), self.dtype)
        mine = slice(at * self.length, (at + 1) * self.length)
        if self.kind == "all_reduce":
            return reduced(part, self.op)
        if self.kind == "broadcast":
            return part[self.root % count]
        if self.kind == "all_gather":
            return np.concatenate(part)
        if self.kind == "reduce_scatter":
            return reduced(whole, self.op)[mine]
        if self.kind == "all_to_all":
            return np.concatenate([each[mine] for each in whole])
        return [(what, member) for member in members]

    def means(self, rank: int) -> dict[str, Any]:
        if self.is_asynchronous or self.kind == "barrier":
            return {}
        return {str(self.number): self.value(rank)}


@dataclass
class Awaited(Event):
    """The result of an asynchronous collective."""

    begun: Collective
    constructs: ClassVar = ("asynchronous collectives",)

    def lines(self, rank: int, program: Program) -> list[str]:
        number = self.begun.number
        if self.begun.kind == "barrier":
            return [f"x{number}_future.result()"]
        return [f"note('{number}', host(x{number}_future.result()))"]

    def means(self, rank: int) -> dict[str, Any]:
        return {} if self.begun.kind == "barrier" else {str(self.begun.number): self.begun.value(rank)}


@dataclass
class Tree(Event):
    """average_gradients()."""

    length: int
    dtype: str
    constructs: ClassVar = ("average_gradients",)

    def lines(self, rank: int, program: Program) -> list[str]:
        one = program.put(f"values('{self.number} one', ({self.length},), {self.dtype!r})")
        two = program.put(f"values('{self.number} two', (2, 3), 'float64')")
        return [
            f"tree = gs.average_gradients({{'one': {one}, 'two': [{two}]}}, communicator={self.group.label})",
            f"note('{self.number} one', host(tree['one']))",
            f"note('{self.number} two', host(tree['two'][0]))",
        ]

    def means(self, rank: int) -> dict[str, Any]:
        one = self.each(rank, f"{self.number} one", (self.length,), self.dtype)
        two = self.each(rank, f"{self.number} two", (2, 3), "float64")
        return {f"{self.number} one": reduced(one, "mean"), f"{self.number} two": reduced(two, "mean")}


@dataclass
class BroadcastList(Event):
    """bcast_list_()."""

    root: int
    length: int
    constructs: ClassVar = ("bcast_list_",)

    def lines(self, rank: int, program: Program) -> list[str]:
        root = self.root % len(self.group.of(rank))
        one = program.put(f"values('{self.number} one', ({self.length},))")
        two = program.put(f"values('{self.number} two', (), 'float64')")
        return [
            f"listed = [{one}, {two}]",
            f"gs.bcast_list_(listed, {root}, {self.group.label})",
            f"note('{self.number} one', host(listed[0]))",
            f"note('{self.number} two', host(listed[1]))",
        ]

    def means(self, rank: int) -> dict[str, Any]:
        root = self.group.of(rank)[self.root % len(self.group.of(rank))]
        return {
            f"{self.number} one": values(f"{self.number} one", (self.length,), "float32", root),
            f"{self.number} two": values(f"{self.number} two", (), "float64", root),
        }


@dataclass
class Program:
    """A training program."""

    seed: int
    backend: str
    world_size: int
    on_device: bool
    groups: list[Group]
    callbacks: list[Callback]
    steps: list[list[Event]]
    stray_at: int | None  # event before which rank 0 makes a callback that is never used
    plants: list[Plant] = field(default_factory=list)

    @property
    def kinds(self) -> list[str]:
        return [plant.kind for plant in self.plants]

    @property
    def events(self) -> list[Event]:
        return [event for step in self.steps for event in step]

    @property
    def fatal(self) -> list[Plant]:
        """The plants after which somebody must end with an error."""
        return [plant for plant in self.plants if not plant.survives and plant.kind != "parameters not broadcast"]

    def put(self, array: str) -> str:
        return f"cupy.asarray({array})" if self.on_device else array

    def plant_at(self, number: int, rank: int) -> Plant | None:
        for plant in self.plants:
            if plant.event == number and plant.rank in (rank, -1):
                return plant
        return None

    def constructs(self) -> set[str]:
        found = {construct for event in self.events for construct in event.constructs}
        used = self.callbacks
        specs = [spec for callback in used for spec in callback.specs.values()]
        passes = [event for event in self.events if isinstance(event, Pass)]
        passes += [each for event in self.events if isinstance(event, Interleaved) for each in (event.one, event.two)]
        sizes = [sum(np.prod(s) * np.dtype(d).itemsize for s, d in callback.specs.values()) for callback in used]
        found |= {
            name
            for name, holds in {
                "two callbacks": len(used) == 2,
                "three callbacks": len(used) == 3,
                "twin callbacks": any(
                    a is not b and (a.specs, a.op, a.group) == (b.specs, b.op, b.group) for a in used for b in used
                ),
                "name=": any(callback.name for callback in used),
                "parameters=": any(callback.parameters for callback in used),
                "parameters= as arrays": any(callback.parameters == "arrays" for callback in used),
                "several buckets": any(s > c.threshold_bytes for s, c in zip(sizes, used, strict=True)),
                "gradient_as_bucket_view": any(callback.is_view for callback in used),
                'missing="zero"': any(callback.is_zero for callback in used),
                "new_group or split": len(self.groups) > 1,
                "own accumulation": any(event.passes > 1 for event in passes),
                "plain collectives": any(isinstance(e, Collective) and not e.is_asynchronous for e in self.events),
                "done-callbacks": any(event.has_done_callback for event in passes),
                "callback made every epoch": any(0 < c.epoch_steps < len(self.steps) for c in used),
                "callback on rank 0 only": self.stray_at is not None,
                "changed before hand-over": any(event.is_changed for event in passes),
                "results kept": any(event.is_kept for event in passes),
                "recurring arrays": any(callback.is_recurring for callback in used),
                "fresh arrays": any(not callback.is_recurring for callback in used),
                "odd layouts": any(callback.layout for callback in used),
                "awkward shapes": any(shape in AWKWARD for shape, _ in specs),
                "order by rank": any(e.callback.parameters and len({*map(tuple, e.orders)}) > 1 for e in passes),
                "flush() without a block": any(not event.callback.has_block for event in passes),
            }.items()
            if holds
        }
        return found | {dtype for _, dtype in specs}

    def source(self, rank: int) -> str:
        """Returns what a rank runs, without the prelude.

        The ranks' programs are one script: what they have in common is at the same lines.
        """
        lines = []
        for parts in zip(*map(self._sections, range(self.world_size)), strict=True):
            counts = [sum(line.count("\n") + 1 for line in part) for part in parts]
            lines += [*parts[rank], *[""] * (max(counts) - counts[rank])]
        return "\n".join([*lines, ""])

    def _sections(self, rank: int) -> list[list[str]]:
        is_unflushed = any(plant.kind == "never flushed" and plant.rank >= 0 for plant in self.plants)
        seconds = 1.0 if is_unflushed or set(self.kinds) & set(AT_THE_DEADLINE) else 60.0
        backend = {"stand-in": "nccl"}.get(self.backend, self.backend)
        options = f'"{backend}", collective_timeout_seconds={seconds}'
        begin = [f"world = gs.init_process_group({options})"]
        if self.on_device:
            begin.insert(0, "import cupy")
        sections = [begin + [f"{group.label} = {group.made[rank]}" for group in self.groups[1:]]]
        is_short = any(plant.kind == "one step less" and plant.rank == rank for plant in self.plants)
        sections += [self._set_up(each, rank) if rank in each.group.of(rank) else [] for each in self.callbacks]
        for at, step in enumerate(self.steps):
            is_left_out = is_short and at == len(self.steps) - 1
            sections.append([f"# step {at}"])
            for callback in self.callbacks:
                is_new = at and callback.epoch_steps and at % callback.epoch_steps == 0 and not is_left_out
                is_mine = rank in callback.group.of(rank)
                sections.append(callback.made(rank, self.plants) if is_new and is_mine else [])
            sections.append([] if is_left_out else self._step(step, rank))
        end = ["for what, array in kept.items():", '    note("kept " + what, host(array))', "world.barrier()"]
        return [*sections, [] if is_short else end]

    def _set_up(self, callback: Callback, rank: int) -> list[str]:
        lines = []
        if callback.parameters == "arrays":
            for name, (shape, dtype) in callback.specs.items():
                differs = any(
                    plant.kind == "parameters not broadcast" and plant.target == callback.label and plant.rank == rank
                    for plant in self.plants
                )
                of = rank if differs else -1
                array = f"values({callback.label + '.' + name!r}, {shape}, {dtype!r}, rank={of})"
                lines.append(f"{callback.variable(name)}_parameter = {self.put(array)}")
        lines += callback.made(rank, self.plants)
        if callback.is_recurring and not callback.has_buffers:
            for name, (shape, dtype) in callback.specs.items():
                array = f"np.zeros({shape}, {dtype!r})"
                array = f"{callback.layout}({array})" if callback.layout else array
                lines.append(f"{callback.variable(name)} = {self.put(array)}")
        return lines

    def _step(self, step: list[Event], rank: int) -> list[str]:
        lines, order = [], list(step)
        for plant in self.plants:
            if plant.kind in ("crosswise", "two communicators crosswise") and plant.rank == rank:
                at = next((at for at, event in enumerate(step) if event.number == plant.event), None)
                if at is not None:
                    order[at], order[at + 1] = order[at + 1], order[at]
        for event in order:
            if self.stray_at == event.number and rank == 0:
                lines.append('stray = gs.AllreduceCallback("mean")')
            if rank not in event.group.of(rank):
                continue
            survives = any(
                plant.survives and plant.event == event.number and plant.kind in CAUGHT_BY_ALL for plant in self.plants
            )
            body = event.lines(rank, self)
            if survives:
                note = f"note('caught {event.number}', True)"
                body = ["try:", *indented(body), "except gs.PlanMismatch:"]
                body += indented([note])
            lines += body
        return lines

    def text(self) -> str:
        """Returns the program for a reader: the first rank's, and what the others' differ in."""
        sources = [re.sub("\n{2,}", "\n", self.source(rank)) for rank in range(self.world_size)]
        parts = [f"# rank 0 of {self.world_size}\n{sources[0]}"]
        for rank, source in enumerate(sources[1:], 1):
            lines = difflib.unified_diff(sources[0].splitlines(), source.splitlines(), "rank 0", f"rank {rank}", n=1)
            parts.append("\n".join(lines) or f"# rank {rank}: the same\n")
        return "\n".join(parts)

    def sources(self) -> list[str]:
        return [f"RANK = {rank}\n{PRELUDE}\n{self.source(rank)}" for rank in range(self.world_size)]


def indented(lines: Sequence[str]) -> list[str]:
    return ["    " + line for line in lines]


def refused(lines: Sequence[str]) -> list[str]:
    return ["try:", *indented(lines), "except ValueError:", "    pass"]


def other_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns another shape, of as many elements where there is one."""
    return shape[::-1] if shape[::-1] != shape else (*shape, 1) if shape else (2,)


# ----------------------------------------------------------------------------------------------------- the drawing


def draw(seed: int, backend: str, world_size: int, kinds: Sequence[str] = PLANTS) -> Program:
    """Draws the program of a seed.

    Args:
        seed: any integer.
        backend: "shm", "stand-in" or "local".
        world_size: number of ranks.
        kinds: the disagreements that may be planted; with one kind alone, all programs have it.
    """
    rng = Random(f"{seed} {backend} {world_size}")
    if world_size == 1:
        kinds = [kind for kind in kinds if kind in ALONE]
    # Those that may stand beside another are drawn more rarely alone; those of one rank have programs of their own.
    weights = [_WEIGHTS.get(kind, 0.85 if kind in ALONE else 1.0) for kind in kinds]
    wanted = None
    if kinds and (len(kinds) == 1 or rng.random() < PLANTED_SHARE):
        wanted = rng.choices(kinds, weights)[0]
    extras = [kind for kind in kinds if kind in SURVIVABLE and kind != wanted]
    for _ in range(2000):
        program = _draw_right(rng, seed, backend, world_size, wanted)
        if wanted is None or _plant(rng, program, wanted):
            break
    else:
        raise AssertionError(f"seed {seed}: no program can have {wanted!r}")
    if wanted is not None and len(kinds) > 1:
        left = rng.choice([0, 2, 3, 4])
        for extra in sorted(extras, key=lambda kind: rng.random() ** (1 / _EXTRA_WEIGHTS[kind]), reverse=True):
            left -= left > 0 and _plant_survivable(rng, program, extra)
    elif wanted is None and "parameters not broadcast" in kinds and rng.random() < 0.1:
        _plant_survivable(rng, program, "parameters not broadcast")
    return program


def _draw_right(rng: Random, seed: int, backend: str, world_size: int, wanted: str | None) -> Program:
    def chance(share: float) -> bool:
        return rng.random() < share

    on_device = backend == "stand-in" and chance(0.5) and wanted != "write in flight"
    everyone = tuple(range(world_size))
    world = Group("world", ("",) * world_size, (everyone,) * world_size)
    groups = [world]
    if chance(0.4) or wanted in AT_THE_DEADLINE:
        groups.append(_draw_group(rng, world_size, wanted))
    callbacks: list[Callback] = []
    for label in "ABC"[: rng.choice([1, 2, 2, 3])]:
        twin = callbacks[-1] if callbacks and chance(0.9 if wanted == "crosswise" else 0.4) else None
        if twin is not None:
            specs, op, group, threshold = twin.specs, twin.op, twin.group, twin.threshold_bytes
        else:
            op, group = rng.choice(["sum", "mean"]), rng.choice(groups)
            dtypes = ["float32", "float32", "float64", "float16"] + ["int32"] * (op == "sum")
            kinds = rng.sample(dtypes, rng.choice([1, 1, 2]))
            count = rng.randint(1, 5)
            specs = {f"w{i}": (rng.choice(SHAPES), rng.choice(kinds)) for i in range(count)}
            threshold = rng.choice([1, 64, 300, HUGE_THRESHOLD])
        parameters = rng.choice([None, None, "specs", "arrays"])
        if wanted == "parameters not broadcast":
            parameters = rng.choice([None, "arrays", "arrays"])
        is_zero = parameters == "specs" and chance(0.5)
        is_view = parameters is not None and chance(0.35)
        if twin is not None and chance(0.7):
            parameters, is_zero, is_view = twin.parameters, twin.is_zero, twin.is_view
        has_buffers = is_view and parameters == "specs" and chance(0.7) and (on_device or backend != "stand-in")
        is_recurring = has_buffers or chance(0.5)
        layout = "" if on_device or has_buffers or chance(0.6) else rng.choice(["strided", "fortran", "read_only"])
        if layout == "read_only" and is_recurring:
            layout = "strided"
        callbacks.append(
            Callback(
                label,
                group,
                op,
                specs,
                threshold,
                f"the {label}" if chance(0.4) or wanted == "different name" else None,
                parameters,
                is_zero,
                is_view,
                has_buffers,
                is_recurring,
                layout,
                chance(0.75),
                rng.choice([0, 0, 1, 2]),
            )
        )
    steps: list[list[Event]] = []
    for _ in range(rng.randint(2, 4)):
        step: list[Event] = []
        for callback in callbacks:
            if chance(0.9):
                step.append(_draw_pass(rng, callback, world_size))
            if chance(0.35):
                step.append(_draw_extra(rng, rng.choice(groups)))
        _interleave(rng, step)
        if chance(0.3) and backend != "local":
            begun = _draw_collective(rng, rng.choice(groups))
            begun.is_asynchronous = begun.kind != "objects"
            if begun.is_asynchronous:
                place = rng.randint(0, len(step))
                step.insert(place, begun)
                step.insert(rng.randint(place + 1, len(step)), Awaited(begun.group, begun))
        if step:
            steps.append(step)
    if not steps:
        steps.append([_draw_pass(rng, callbacks[0], world_size)])
    program = Program(seed, backend, world_size, on_device, groups, callbacks, steps, None)
    for number, event in enumerate(program.events):
        event.number = number
        if isinstance(event, Interleaved):
            event.one.number = event.two.number = number
    if chance(0.25):
        program.stray_at = rng.randrange(len(program.events))
    return program


def _draw_group(rng: Random, world_size: int, wanted: str | None) -> Group:
    everyone = tuple(range(world_size))
    if world_size > 1 and (wanted == "two communicators crosswise" or (world_size == 2 and wanted is not None)):
        return Group("twin", (f"gs.new_group({list(everyone)})",) * world_size, (everyone,) * world_size)
    if world_size > 2 and rng.random() < 0.4 and wanted is None:
        colors = [rng.choice([0, 1]) for _ in everyone]
        made = tuple(f"world.split({color})" for color in colors)
        members = tuple(tuple(r for r in everyone if colors[r] == color) for color in colors)
        return Group("part", made, members)
    chosen = tuple(sorted(rng.sample(everyone, rng.randint(min(2, world_size), world_size))))
    return Group("pair", (f"gs.new_group({list(chosen)})",) * world_size, (chosen,) * world_size)


def _draw_pass(rng: Random, callback: Callback, world_size: int) -> Pass:
    names = list(callback.specs)
    if not callback.parameters and rng.random() < 0.15:  # a layer that is frozen for a step
        names = rng.sample(names, rng.randint(1, len(names)))
    orders = [list(names) for _ in range(world_size)]
    if callback.parameters:
        for order in orders:
            if rng.random() < 0.6:
                rng.shuffle(order)
            if callback.is_zero:
                del order[rng.randint(0, len(order)) :]
    drawn = Pass(callback.group, callback, orders)
    drawn.passes = rng.choice([1, 1, 2, 3])
    drawn.is_changed = callback.layout != "read_only" and rng.random() < 0.25
    drawn.has_done_callback = rng.random() < 0.25
    drawn.is_kept = not callback.is_recurring and not callback.is_view and rng.random() < 0.4
    return drawn


def _draw_extra(rng: Random, group: Group) -> Event:
    kind = rng.choice(["collective", "collective", "tree", "list"])
    if kind == "tree":
        return Tree(group, rng.randint(0, 9), rng.choice(["float32", "float64"]))
    if kind == "list":
        return BroadcastList(group, rng.randrange(6), rng.randint(0, 9))
    return _draw_collective(rng, group)


def _draw_collective(rng: Random, group: Group) -> Collective:
    kinds = ["all_reduce"] * 3 + ["broadcast", "all_gather", "reduce_scatter", "all_to_all", "barrier", "objects"]
    kind = rng.choice(kinds)
    # Lengths that no other collective has: which one of two equal ones a rank leaves out, nobody can know.
    length, op = rng.randint(11, 10_000), rng.choice(["sum", "mean", "max", "min"])
    return Collective(group, kind, op, rng.randrange(6), length, rng.choice(["float32", "float64"]))


def _interleave(rng: Random, step: list[Event]) -> None:
    for at in range(len(step) - 1):
        one, two = step[at : at + 2]
        if not isinstance(one, Pass) or not isinstance(two, Pass) or one.group != two.group:
            continue
        if rng.random() < 0.3:
            for each in (one, two):
                each.orders = [list(each.orders[0]) for _ in each.orders]
                if each.callback.is_zero:
                    each.orders = [list(each.callback.specs) for _ in each.orders]
            step[at : at + 2] = [Interleaved(one.group, one, two)]
            return


# ------------------------------------------------------------------------------------------------ disagreements


def _plant(rng: Random, program: Program, kind: str) -> bool:
    """Plants a disagreement, if the program has a place for it."""
    places = list(_places(rng, program, kind))
    if not places:
        return False
    place = rng.choice(places)
    program.plants.append(place)
    if kind == "crosswise":
        _make_alike(program.events[place.event], program.events[place.event + 1])
    return True


def _make_alike(one: Event, two: Event) -> None:
    """Makes the passes of two callbacks differ in nothing but the callback, where these hand over the same."""
    if not isinstance(one, Pass) or not isinstance(two, Pass):
        return
    a, b = one.callback, two.callback
    if (a.specs, a.parameters, a.is_zero) == (b.specs, b.parameters, b.is_zero):
        two.orders = [list(order) for order in one.orders]


def _plant_survivable(rng: Random, program: Program, kind: str) -> bool:
    """Plants one that the program survives, before those that it does not; whether there was a place."""
    first = min([_first_event(program, p) for p in program.plants if not p.survives], default=len(program.events))
    taken = {plant.event + i for plant in program.plants if plant.event >= 0 for i in (0, 1)}
    places = []
    for place in _places(rng, program, kind):
        at = _first_event(program, place)
        if at >= first or at in taken or at + 1 in taken:
            continue
        event = program.events[at]
        # With parameters a rank that differs may get InvalidArgument, and the others nothing.
        is_plain = isinstance(event, Collective) or (isinstance(event, Pass) and event.callback.parameters is None)
        if kind in CAUGHT_BY_ALL and not is_plain:
            continue
        if kind == "different op" and place.target:
            continue
        places.append(place)
    if places:
        place = rng.choice(places)
        place.survives = True
        program.plants.append(place)
    return bool(places)


def _first_event(program: Program, plant: Plant) -> int:
    """Returns the number of the first event that a plant changes."""
    if plant.kind == "one step less":
        return program.steps[-1][0].number
    if plant.target:
        callbacks = [callback for callback in program.callbacks if callback.label == plant.target]
        return min(event.number for event in program.events if callbacks[0] in _callbacks_of(event))
    return plant.event


def _members(group: Group) -> list[int]:
    return sorted({rank for members in group.members for rank in members if len(members) > 1})


def _places(rng: Random, program: Program, kind: str) -> Iterator[Plant]:
    """Yields where a disagreement could be planted."""
    events = program.events
    last_step = program.steps[-1]
    if kind == "one step less":
        ranks = {rank for event in last_step for rank in _members(event.group)}
        yield from [Plant(kind, rank) for rank in ranks]
        return
    if kind in ("different name", "parameters not broadcast"):
        for callback in program.callbacks:
            is_used = any(callback in _callbacks_of(event) for event in events)
            if not is_used or (callback.parameters != "arrays" and kind == "parameters not broadcast"):
                continue
            if not any(np.prod(shape) for shape, _ in callback.specs.values()):
                continue
            yield from [Plant(kind, rank, target=callback.label) for rank in _members(callback.group)]
        return
    for step in program.steps:
        for at, event in enumerate(step):
            following = step[at + 1] if at + 1 < len(step) else None
            for rank in _members(event.group) if kind not in ALONE else range(program.world_size):
                if rank in event.group.of(rank):
                    yield from _at(rng, program, kind, rank, event, following)


def _callbacks_of(event: Event) -> list[Callback]:
    if isinstance(event, Interleaved):
        return [event.one.callback, event.two.callback]
    return [event.callback] if isinstance(event, Pass) else []


def _at(rng: Random, program: Program, kind: str, rank: int, event: Event, following: Event | None) -> Iterator[Plant]:
    plant = Plant(kind, rank, event.number)
    if kind == "crosswise":
        if following is not None and following.group == event.group and _can_cross(event, following):
            yield plant
    elif kind == "two communicators crosswise":
        plain = (Pass, Collective, Tree, BroadcastList)
        if not isinstance(event, plain) or not isinstance(following, plain) or following.group == event.group:
            return
        if any(isinstance(e, Collective) and e.is_asynchronous for e in (event, following)):
            return
        # Each must take data of the others, or nobody waits.
        if event.group.of(rank) == following.group.of(rank) and all(map(_has_work, (event, following))):
            yield plant
    elif kind == "world against group":
        if isinstance(event, Collective) and event.kind == "all_reduce" and not event.is_asynchronous:
            others = [g for g in program.groups if g != event.group and len(g.of(rank)) > 1 and rank in g.of(rank)]
            for other in others:
                yield Plant(kind, rank, event.number, detail=other.label)
    elif kind == "different op":
        if isinstance(event, Collective) and event.kind == "all_reduce" and not event.is_asynchronous:
            yield Plant(kind, rank, event.number, detail={"sum": "max", "max": "sum"}.get(event.op, "sum"))
        for callback in _callbacks_of(event):
            if isinstance(event, Pass) and all(dtype.startswith("float") for _, dtype in callback.specs.values()):
                yield Plant(kind, rank, target=callback.label)
    elif isinstance(event, Pass):
        yield from _at_pass(rng, program, plant, event)


def _has_work(event: Event) -> bool:
    return not isinstance(event, Pass) or not event.callback.is_zero


def _can_cross(one: Event, two: Event) -> bool:
    """Whether the one on one rank against the other on another is a disagreement that can be seen."""
    if isinstance(one, Pass) and isinstance(two, Pass):
        return one.callback is not two.callback and bool(one.orders[0] or two.orders[0])
    if any(isinstance(event, (Interleaved, Awaited)) for event in (one, two)):
        return False
    if any(isinstance(event, Collective) and event.is_asynchronous for event in (one, two)):
        return False
    return type(one) is not type(two)


def _at_pass(rng: Random, program: Program, plant: Plant, event: Pass) -> Iterator[Plant]:
    kind, rank, callback = plant.kind, plant.rank, event.callback
    names = event.orders[rank]
    plain = callback.parameters is None
    if kind == "order swapped" and plain:
        # Each dtype has buckets of its own, so that the order of two dtypes is no disagreement.
        alike = [one for one, two in pairwise(names) if callback.specs[one][1] == callback.specs[two][1]]
        if not alike:
            return
        plant.detail = rng.choice(alike)
    elif (kind in ("different shape", "gradient left out") and not callback.is_zero and names) or (
        kind == "different dtype" and names
    ):
        plant.detail = rng.choice(names)
    elif kind == "write in flight":
        can_write = callback.layout != "read_only" and not callback.has_buffers and not program.on_device
        sized = [name for name in names if np.prod(callback.specs[name][0])]
        if not can_write or not sized:
            return
        plant.detail = rng.choice(sized)
    elif kind == "collective in a done-callback" and names:
        plant.detail = rng.choice(names)
        plant.rank = rng.choice([rank, -1]) if not callback.is_zero else rank
    elif kind == "rank raises" and names:
        plant.detail = rng.choice(names)
    elif kind == "never flushed" and plain and names and callback.threshold_bytes == HUGE_THRESHOLD:
        later = [each for each in program.events if each.number > event.number]
        if any(callback in _callbacks_of(each) for each in later) or callback.epoch_steps:
            return
        if not any(np.prod(callback.specs[name][0]) for name in names):
            return
        plant.rank = rng.choice([rank, -1])
    else:
        return
    yield plant


# ---------------------------------------------------------------------------------------------------- the verdict


def violations(program: Program, endings: Sequence[Ending]) -> list[str]:
    """Returns what is wrong with how the ranks of a program ended."""
    found = []
    for rank, ending in enumerate(endings):
        found += [f"rank {rank}: {text}" for text in _violations_of(program, rank, ending)]
    told = {rank for plant in program.fatal for rank in _to_be_told(program, plant, endings)}
    for rank in sorted(told):
        if endings[rank].error is None and not _was_told_at_exit(program, rank, endings[rank]):
            found.append(f"rank {rank}: ended without an error, as if nothing had been wrong")
    if "parameters not broadcast" in program.kinds and not any("bcast_list_" in e.output for e in endings):
        found.append("no rank has warned of parameters that differ")
    return found


def _violations_of(program: Program, rank: int, ending: Ending) -> Iterator[str]:
    if ending.exit_code is None:
        yield f"did not end; its output: {ending.output[-2000:]}"
        return
    meant = _meaning(program, rank)
    wrote = {what.removeprefix("wrote "): done for what, done in ending.notes if what.startswith("wrote ")}
    caught = {int(what.split()[1]) for what, _ in ending.notes if what.startswith("caught ")}
    # On a device result() orders the stream, not the host: what the program reads then, after the collective has been
    # aborted, is no result, and its next call raises the error.
    is_aborted = program.backend == "stand-in" and ending.error is not None
    aborted = {what for what, _ in ending.notes[-1:]} if is_aborted else set()
    # NCCL multiplies each value by 1/3 before it adds, which rounds otherwise than the model's one division.
    alike = _nearly_same if (program.backend, program.world_size) == ("stand-in", 3) else same
    noted = {}
    for what, value in ending.notes:
        if what.split()[0] in ("wrote", "caught"):
            continue
        noted[what] = value
        bare = what.removeprefix("kept ")
        if bare not in meant:
            yield f"noted {what}, which it should not have"
        elif not alike(value, meant[bare]) and not (wrote.get(bare) and alike(value, meant[bare] + 1)):
            if what in aborted:
                continue
            yield f"wrong number in {what}: {value!r}, and not {meant[bare]!r}"
    if ending.error is None:
        missing = [what for what in meant if what not in noted and int(what.split()[0]) not in caught]
        unflushed = [p for p in program.plants if p.kind == "never flushed" and p.rank in (rank, -1)]
        skipped = [p.event for p in unflushed]
        if any(plant.kind == "one step less" and plant.rank == rank for plant in program.plants):
            skipped += [event.number for event in program.steps[-1]]
        missing = [what for what in missing if int(what.split()[0]) not in skipped]
        if missing:
            yield f"has no result of {', '.join(missing)}"
        is_member = any(rank in program.events[p.event].group.of(rank) for p in unflushed)
        if is_member and "handed over and never reduced" not in ending.output:
            yield f"nothing is told of gradients that were never flushed: {ending.output[-2000:]}"
        if ending.exit_code != 0:
            yield f"exit code {ending.exit_code}: {ending.output[-2000:]}"
        if not program.plants and "Traceback" in ending.output:
            yield f"a traceback in its output: {ending.output[-2000:]}"
        return
    kind, is_ours, text = ending.error
    if not program.fatal:
        yield f"{kind}: {text}\n{ending.output[-3000:]}"
    elif not is_ours and not _is_planted_error(program, rank, kind, text):
        yield f"an error of another type: {kind}: {text}\n{ending.output[-3000:]}"
    if ending.exit_code == 0:
        yield f"exit code 0 after {kind}"


def _was_told_at_exit(program: Program, rank: int, ending: Ending) -> bool:
    """Whether the program was over when a done-callback, in another thread, was refused its collective."""
    kinds = [plant.kind for plant in program.plants if plant.rank in (rank, -1)]
    is_told = "in a done-callback, at program.py" in ending.output and "error: rank " in ending.output
    return "collective in a done-callback" in kinds and is_told


def _is_planted_error(program: Program, rank: int, kind: str, text: str) -> bool:
    mine = [plant.kind for plant in program.plants if plant.rank in (rank, -1)]
    if kind == "ValueError" and "write in flight" in mine:
        return "read-only" in text
    return kind == "RuntimeError" and text == "planted" and "rank raises" in mine


def _meaning(program: Program, rank: int) -> dict[str, Any]:
    meant = {}
    for event in program.events:
        if rank in event.group.of(rank):
            meant.update(event.means(rank))
    return meant


def same(got: Any, wanted: Any) -> bool:
    """Whether two results are equal, bit for bit."""
    if not isinstance(wanted, np.ndarray):
        return bool(got == wanted)
    if not isinstance(got, np.ndarray) or (got.shape, got.dtype) != (wanted.shape, wanted.dtype):
        return False
    return bool(np.array_equal(got, wanted))


def _nearly_same(got: Any, wanted: Any) -> bool:
    """Whether two results differ by no more than a few roundings of values of up to 100."""
    if not isinstance(wanted, np.ndarray) or not np.issubdtype(wanted.dtype, np.inexact):
        return same(got, wanted)
    if not isinstance(got, np.ndarray) or (got.shape, got.dtype) != (wanted.shape, wanted.dtype):
        return False
    error = 4 * float(np.finfo(wanted.dtype).eps)
    return bool(np.allclose(got, wanted, rtol=error, atol=100 * error))


def _to_be_told(program: Program, plant: Plant, endings: Sequence[Ending]) -> set[int]:
    """Returns the ranks that must end with an error after a plant."""
    rank, kind = plant.rank, plant.kind
    if kind in ("one step less", "rank raises"):
        begin = program.steps[-1][0].number if kind == "one step less" else plant.event
        told = set(range(program.world_size)) if program.world_size > 1 else {rank}  # there is a barrier at the end
        for event in program.events[begin:]:
            if rank in event.group.of(rank):
                told |= set(event.group.of(rank))
        return told - {rank} if kind == "one step less" else told
    if plant.event < 0:
        group = next(callback.group for callback in program.callbacks if callback.label == plant.target)
        return set(group.of(rank))
    group = program.events[plant.event].group
    members = set(_members(group)) if rank < 0 else set(group.of(rank))
    if rank < 0 and program.world_size == 1:
        members = {0}
    if kind == "collective in a done-callback":
        return {rank} if rank >= 0 else set(range(program.world_size)) & _all_in(group)
    if kind == "order swapped" and all(endings[member].error is None for member in members):
        return set()  # one of the two went alone, in a bucket of its own: the order makes no difference
    if kind == "write in flight":
        went_through = any(what.startswith("wrote ") for what, _ in endings[rank].notes)
        return set() if went_through else members
    if kind == "never flushed":
        return set() if rank < 0 else members - {rank}
    return members


def _all_in(group: Group) -> set[int]:
    return {rank for rank, members in enumerate(group.members) if rank in members}


# ---------------------------------------------------------------------------------------------------- the command


@dataclass
class Table:
    """What was drawn, and how it ended."""

    programs: int = 0
    right: int = 0
    constructs: Counter[str] = field(default_factory=Counter)
    planted: Counter[str] = field(default_factory=Counter)
    endings: Counter[str] = field(default_factory=Counter)

    def add(self, program: Program, endings: Sequence[Ending]) -> None:
        self.programs += 1
        caught = any(what.startswith("caught ") for ending in endings for what, _ in ending.notes)
        self.right += not caught and all(ending.error is None and ending.exit_code == 0 for ending in endings)
        self.constructs.update(program.constructs())
        self.planted.update(program.kinds)
        self.endings.update(ending.error[0] if ending.error else "none" for ending in endings)

    def text(self) -> str:
        def share(number: int) -> str:
            return f"{number:6d}  {100 * number / max(self.programs, 1):5.1f} %"

        lines = [f"{self.programs} programs, of which ended in right numbers on all ranks: {share(self.right).strip()}"]
        lines += ["", "construct                         programs"]
        lines += [f"{name:32s} {share(self.constructs[name])}" for name in CONSTRUCTS]
        lines += ["", "disagreement                       planted"]
        lines += [f"{name:32s} {share(self.planted[name])}" for name in PLANTS]
        lines += ["", "errors by rank"]
        lines += [f"{name:32s} {number:6d}" for name, number in self.endings.most_common()]
        return "\n".join(lines)


class Runner:
    """Runs programs on a backend, several at a time.

    Args:
        backend: "shm", "stand-in" or "local".
        lanes: how many at a time.
    """

    def __init__(self, backend: str, lanes: int = 2) -> None:
        self._idle: SimpleQueue[ProgramRanks] = SimpleQueue()
        self._lanes = [ProgramRanks(backend) for _ in range(lanes)]
        for lane in self._lanes:
            self._idle.put(lane)
        self._threads = ThreadPoolExecutor(lanes)

    def run(self, program: Program, deadline_seconds: float = 90.0) -> list[Ending]:
        lane = self._idle.get()
        try:
            return lane.run(program.sources(), deadline_seconds=deadline_seconds, environment={})
        finally:
            self._idle.put(lane)

    def run_all(self, programs: Sequence[Program]) -> Iterator[tuple[Program, list[Ending]]]:
        yield from zip(programs, self._threads.map(self.run, programs), strict=True)

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        for lane in self._lanes:
            lane.close()


def report(program: Program, endings: Sequence[Ending], found: Sequence[str]) -> str:
    """Returns a violation as text."""
    planted = "; ".join(
        f"{p.kind} on {'all ranks' if p.rank < 0 else f'rank {p.rank}'}" + (" (survivable)" if p.survives else "")
        for p in program.plants
    )
    head = f"seed {program.seed}, {program.backend}, {program.world_size} ranks; planted: {planted or 'nothing'}"
    ends = [f"rank {r}: exit code {e.exit_code}, {e.error and e.error[0]}" for r, e in enumerate(endings)]
    return "\n".join([head, *found, *ends, program.text()])


def main() -> int:
    """Runs programs, and prints what was drawn; fails on the first violation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="of the first program; the next have the next ones")
    parser.add_argument("--backend", choices=["shm", "local", "stand-in"], help="default: half of them shm on 2 ranks")
    parser.add_argument("--ranks", type=int, choices=[1, 2, 3], default=2)
    parser.add_argument("--kinds", help="disagreements to plant, with commas; none: only right programs")
    parser.add_argument("--skip", default="", help="disagreements to leave out, with commas")
    parser.add_argument("--lanes", type=int, default=3, help="programs at a time")
    parser.add_argument("--keep-going", action="store_true", help="print every violation, and how many there were")
    parser.add_argument("--show", action="store_true", help="print each program and how it ended")
    options = parser.parse_args()
    kinds = PLANTS if options.kinds is None else [kind for kind in options.kinds.split(",") if kind not in ("", "none")]
    unknown = {*kinds, *options.skip.split(",")} - {*PLANTS, ""}
    if unknown:
        parser.error(f"unknown disagreements {', '.join(sorted(unknown))}; there are {', '.join(PLANTS)}")
    kinds = [kind for kind in kinds if kind not in options.skip.split(",")]
    count = options.programs
    if options.backend:
        shares = [(options.backend, 1 if options.backend == "local" else options.ranks, count)]
    else:
        shares = [("shm", 2, count // 2), ("shm", 3, count // 4), ("stand-in", 2, count * 3 // 20)]
        shares.append(("local", 1, count - sum(share for *_, share in shares)))
    table, failed, began = Table(), 0, time.monotonic()
    for backend, ranks, share in shares:
        runner = Runner(backend, options.lanes)
        try:
            programs = [draw(options.seed + i, backend, ranks, kinds) for i in range(share)]
            for program, endings in runner.run_all(programs):
                table.add(program, endings)
                found = violations(program, endings)
                if options.show:
                    print(report(program, endings, []), *[e.output for e in endings], sep="\n")
                if found:
                    print(report(program, endings, found), flush=True)
                    failed += 1
                    if not options.keep_going:
                        return 1
        finally:
            runner.close()
    print(table.text())
    print(f"\n{failed} violations; {(time.monotonic() - began) / max(table.programs, 1):.3f} s a program")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
