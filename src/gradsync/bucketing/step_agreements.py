"""What the ranks agree on in a backward pass: one event for each bucket, and one for the flush."""

from __future__ import annotations

from functools import partial
from typing import Any

from gradsync.bucketing.callback_identity import KnownCallback
from gradsync.bucketing.plan import Bucket, list_of_names
from gradsync.communicators.agreement import Agreement, digest_of
from gradsync.diagnostics import names_text, size_text
from gradsync.reduction import ReduceOp


class StepAgreements:
    """The events of a step, each as an Agreement; a step that repeats the last one makes no new ones.

    Args:
        op: sum or mean.
        settings: what else ranks must agree on about all buckets, in words; "" where there is nothing.
    """

    def __init__(self, op: ReduceOp, settings: str = "") -> None:
        self._reduce_op = op
        self._callback: KnownCallback | None = None
        self._others: dict[int, Agreement] = {}
        self.change_settings(settings)
        self._index = 0
        self.local_passes = 0

    def change_settings(self, settings: str) -> None:
        """Has the events to come include other settings; between steps."""
        op = self._reduce_op.value
        self._op = f"{op}, {settings}" if settings else op
        self._known: list[tuple[Any, Agreement]] = []

    def change_callback(self, callback: KnownCallback | None) -> None:
        """Has the events to come be those of the callback as the ranks know it; None where they need not."""
        self._callback = callback
        self._known = []
        self._others = {}

    def of_callback(self, agreement: Agreement) -> Agreement:
        """Returns an agreement on something that the callback does beside its steps, as one that says whose it is."""
        if self._callback is None:
            return agreement
        known = self._others.get(agreement.digest)
        if known is None:
            known = self._others[agreement.digest] = self._callback.mark(agreement)
        return known

    def begin_step(self) -> None:
        self._index = 0
        self.local_passes = 0

    def bucket(self, bucket: Bucket) -> Agreement:
        """Returns the agreement to reduce this bucket next."""
        event = (bucket, self.local_passes)  # of a repeated step it is the very same bucket
        return self._next(event, self._describe_bucket, self._summarise_bucket, _facts_of_bucket)

    def flush(self, gradients: int, missing: tuple[str, ...] = ()) -> Agreement:
        """Returns the agreement that the step ends here, after so many gradients; `missing` names those that are."""
        event = ((gradients, missing), self.local_passes)
        if self._index == 0:  # an empty step says nothing about the next: what is known stays
            return self._make(event, 0, self._describe_flush, self._summarise_flush, _facts_of_flush)
        return self._next(event, self._describe_flush, self._summarise_flush, _facts_of_flush)

    def _next(self, event: tuple[Any, int], describe: Any, summarise: Any, facts: Any) -> Agreement:
        index, self._index = self._index, self._index + 1
        if index < len(self._known):
            known, agreement = self._known[index]
            if known == event:
                return agreement
            del self._known[index:]
        agreement = self._make(event, index, describe, summarise, facts)
        self._known.append((event, agreement))
        return agreement

    def _make(self, event: tuple[Any, int], index: int, describe: Any, summarise: Any, facts: Any) -> Agreement:
        of_what, passes = event
        content = of_what.specs if isinstance(of_what, Bucket) else of_what
        digest = digest_of("gradients", index, self._op, content, passes)
        agreement = Agreement(
            digest, partial(describe, event), index, partial(summarise, event), tell=partial(facts, event, self._op)
        )
        return agreement if self._callback is None else self._callback.mark(agreement)

    def _describe_bucket(self, event: tuple[Bucket, int]) -> str:
        specs = event[0].specs
        total_bytes = sum(spec.size_bytes for spec in specs)
        lines = [f"{spec.name}: {spec.dtype}{list(spec.shape)}" for spec in specs]
        of_what = f"{_count(len(specs), 'gradient')}, {total_bytes} bytes"
        headline = f"all_reduce ({self._op}) of a bucket of {of_what}{_after(event)}"
        return "\n".join([headline, *lines])

    def _summarise_bucket(self, event: tuple[Bucket, int]) -> str:
        specs = event[0].specs
        size = size_text(sum(spec.size_bytes for spec in specs))
        names = names_text([spec.label for spec in specs])
        return f"all_reduce({self._op}) {specs[0].dtype} {size} {names}"

    def _describe_flush(self, event: tuple[tuple[int, tuple[str, ...]], int]) -> str:
        gradients, missing = event[0]
        without = f", without one for {list_of_names(missing)}" if missing else ""
        return f"flush ({self._op}) after {_count(gradients, 'gradient')}{without}{_after(event)}"

    def _summarise_flush(self, event: tuple[tuple[int, tuple[str, ...]], int]) -> str:
        return f"flush({self._op}) after {_count(event[0][0], 'gradient')}"


def _facts_of_bucket(event: tuple[Bucket, int], op: str) -> dict[str, Any]:
    bucket = event[0]
    return {
        "collective": "all_reduce",
        "detail": op,
        "dtype": bucket.specs[0].dtype,
        "count": sum([spec.size_bytes // spec.itemsize for spec in bucket.specs]),
        "bucket": bucket.number,
        "gradients": [spec.label for spec in bucket.specs],
        **_facts_of_passes(event),
    }


def _facts_of_flush(event: tuple[tuple[int, tuple[str, ...]], int], op: str) -> dict[str, Any]:
    gradients, missing = event[0]
    return {"collective": "flush", "detail": op, "gradients": gradients, "missing": missing, **_facts_of_passes(event)}


def _facts_of_passes(event: tuple[Any, int]) -> dict[str, int]:
    return {"local_passes": event[1]} if event[1] else {}


def _after(event: tuple[Any, int]) -> str:
    return f", after {_count(event[1], 'local pass', 'local passes')} (no_sync)" if event[1] else ""


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
