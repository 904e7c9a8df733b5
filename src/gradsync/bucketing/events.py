"""What the ranks agree on in a step: which callback it is, its options, and all gradients of the step.

The agreement of a step is its digest, compared before anything moves, and its text, exchanged when the digests differ.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from gradsync.bucketing.bucket import Bucket, GradientSpec, list_of_names
from gradsync.bucketing.forgotten import identities
from gradsync.communicators import world
from gradsync.communicators.agreement import WEIGHT, Agreement, Description, digest_of
from gradsync.communicators.communicator import Communicator
from gradsync.diagnostics import names_text
from gradsync.errors import InvalidArgument, caller, shown, size_text
from gradsync.reduction import ReduceOp

_MOST_CHARACTERS = 80  # in a callback's name
_WEIGHTS = "backward(weight=) exchange of batch weights"  # a notice has the number after ")"


class CallbackIdentity:
    """Which callback it is: its name, or the line of the program that made it, the same on all ranks.

    Args:
        name: the name that the program gave the callback, or None.
        group: the callback's communicator; None means the world communicator.

    Attributes:
        name: see Args.
        made_at: the line, such as "gan/train.py:41".
        text: the name's repr or the line: what the ranks compare.

    Raises:
        InvalidArgument: the name is not a string of printable characters, or is too long.
    """

    def __init__(self, name: str | None, group: Communicator | None) -> None:
        if name is not None and (
            not isinstance(name, str) or not 0 < len(name) <= _MOST_CHARACTERS or not name.isprintable()
        ):
            raise InvalidArgument(
                f"AllreduceCallback needs name as text of 1 to {_MOST_CHARACTERS} printable characters, or None, got "
                f"{shown(name)}"
            )
        self.name = name
        self._group = group
        self.made_at = _line_of_program()
        self.text = self.made_at if name is None else repr(str(name))

    @property
    def is_of_world(self) -> bool:
        """Whether its communicator is the world's, whichever that is."""
        return self._group is None

    def check_alone(self, communicator: Communicator) -> None:
        """Refuses, at its first use, a callback that the ranks could take for another one that is alive.

        Two of one helper, or of one line in a loop, look alike: ranks that make or use them crosswise would average
        two models into each other. So neither can be used while both are there; one that is in use goes on.

        Raises:
            InvalidArgument: a callback of the same name or line, for the same group, is alive.
        """
        if communicator.world_size > 1 and self._has_double():
            gc.collect()  # one that is only in a reference cycle does not count
            if self._has_double():
                which = f"were made at {self.made_at}" if self.name is None else f"have the name {self.text}"
                raise InvalidArgument(
                    f"{communicator.label}: two callbacks that {which} are alive, and the ranks could take one for the "
                    'other: give each its own name, gs.AllreduceCallback(..., name="generator"), or drop the other one '
                    "(an exception that is kept keeps it alive)"
                )

    def _has_double(self) -> bool:
        own = self._group or world.current
        alike = [each for each in identities() if each is not self and each.text == self.text]
        return any((each._group or world.current) is own for each in alike)


def _line_of_program() -> str:
    """Returns the line of the program that makes a callback; the file without the folder that differs by machine."""
    found = caller()
    if found is None:
        return "an unknown line"
    file = found.code.co_filename
    folders = [folder for each in sys.path if file.startswith(folder := os.path.join(each or os.getcwd(), ""))]
    return f"{file[len(min(folders, key=len)) :] if folders else os.path.basename(file)}:{found.line}"


class StepEvents:
    """Makes the agreements of a callback's steps.

    Args:
        op: the operator of the reduction: sum or mean.
        identity: which callback it is.
        settings: the options on which the ranks must agree, by name, as text; a flag has the value "".
        threshold_bytes: the option, for texts.
    """

    def __init__(
        self, op: ReduceOp, identity: CallbackIdentity, settings: Mapping[str, str], threshold_bytes: Any
    ) -> None:
        self._op, self._identity, self._threshold_bytes = op, identity, threshold_bytes
        self.change_settings(settings)

    def change_settings(self, settings: Mapping[str, str]) -> None:
        """Changes the settings of later steps."""
        self._others: dict[str, Agreement] = {}
        self._words = ", ".join([self._op.value, *[f"{name} {each}".rstrip() for name, each in settings.items()]])

    def of_step(self, buckets: Sequence[Bucket], missing: Sequence[str] = (), *, weighted: bool = False) -> Agreement:
        """Returns the agreement on a whole step.

        Args:
            buckets: of the gradients that will be reduced.
            missing: the names of parameters that have no gradient on this rank, with missing="error".
            weighted: whether this rank has a weight.
        """
        specs = [spec for bucket in buckets for spec in bucket.specs]
        layout = [len(bucket.specs) for bucket in buckets]
        return self._agreement("step", specs, layout, tuple(missing), weighted=weighted)

    def of_bucket(self, step: Agreement, bucket: Bucket) -> Agreement:
        """Returns the agreement on one bucket of a step: the step's own, with the bucket's line for the recorder.

        Its digest is another for each bucket: a rank that fails between two buckets and begins anew must not meet the
        others' next bucket.
        """
        names = names_text([spec.label for spec in bucket.specs])
        line = f"all_reduce({self._words}) {bucket.specs[0].dtype} {size_text(bucket.size_bytes)} {names}"
        return step._replace(digest=step.digest ^ bucket.number, summarise=lambda: line)

    def of_weights(self, step: Agreement) -> Agreement:
        """Returns the agreement on the exchange of weights at the beginning of a step."""
        return Agreement(digest_of("weights", step.digest), step.describe, summarise=lambda: _WEIGHTS)

    def of_memory(self, buckets: Sequence[Bucket]) -> Agreement:
        """Returns the agreement on the memory of buckets."""
        specs = [spec for bucket in buckets for spec in bucket.specs]
        return self._agreement("gradient_buffers", specs, [len(bucket.specs) for bucket in buckets], ())

    def of(self, what: str) -> Agreement:
        """Returns the agreement on anything else that the callback does with all ranks."""
        if what not in self._others:
            self._others[what] = self._agreement(what, [], [], ())
        return self._others[what]

    def _agreement(
        self, what: str, specs: Sequence[GradientSpec], layout: Sequence[int], more: Any, *, weighted: bool = False
    ) -> Agreement:
        identity, words = self._identity, self._words
        lines = tuple(map(str, specs))
        size_bytes = sum(spec.size_bytes for spec in specs)
        count = f"{len(specs)} gradient{'' if len(specs) == 1 else 's'}"
        headline = f"{what} of {count}" if specs else what
        if what == "step":
            buckets = "" if len(layout) == 1 else f" in {len(layout)} buckets"
            headline = f"step ({words}) of {count}{buckets}, {size_bytes} bytes"
        if more and what == "step":
            headline += f", without a gradient for {list_of_names(more)}"
        if weighted:
            headline += ", with a weight"
        name = "" if identity.name is None else f" {identity.text},"
        named = f" (callback{name} made at {identity.made_at})"
        if not identity.made_at:  # of average_gradients(), which a program calls at many lines
            named = f" ({identity.name})"
        size = "" if self._threshold_bytes is None else f", threshold_bytes {self._threshold_bytes}"
        options = words + size + (WEIGHT if weighted else "")
        description = Description(headline + named, lines, callback=identity.text, options=options)
        digest = digest_of("gradients", identity.text, what, words, lines, layout, more, weighted)
        return Agreement(digest, lambda: description, summarise=lambda: headline)
