"""`gradsync doctor`, from its options to its exit code."""

from __future__ import annotations

import json
import time

from gradsync.doctor.report import Report, as_dictionary, examine
from gradsync.doctor.screen import show
from gradsync.doctor.surroundings import look_around
from gradsync.doctor.trials import BACKENDS, try_backend
from gradsync.environment import BACKEND

_PROBE_SECONDS = 6.0


def doctor(*, backend: str | None, as_json: bool, deadline_seconds: float, tries: bool) -> int:
    """Looks, tries and prints, with the options of the command; returns the exit code."""
    began = time.monotonic()
    here = look_around(_PROBE_SECONDS)
    findings = examine(here)
    asked_for = backend or _asked_for_in(here.environ.get(BACKEND, ""))
    backends = (backend,) if backend else BACKENDS
    trials = [try_backend(each, here, findings, deadline_seconds) for each in backends] if tries else []
    report = Report(findings, trials, asked_for, time.monotonic() - began)
    if as_json:
        print(json.dumps(as_dictionary(report), indent=2))
    else:
        show(report)
    return 0 if report.is_well else 1


def _asked_for_in(value: str) -> str | None:
    """Returns the backend that the environment asks for by name."""
    return value if value in BACKENDS else None
