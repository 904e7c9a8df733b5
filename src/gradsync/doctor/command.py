"""`gradsync doctor`, from its options to its exit code."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass

from gradsync.doctor.report import Report, as_dictionary, examine
from gradsync.doctor.screen import show
from gradsync.doctor.surroundings import look_around
from gradsync.doctor.trials import BACKENDS, try_backend
from gradsync.environment import BACKEND

_PROBE_SECONDS = 6.0


@dataclass(frozen=True)
class DoctorOptions:
    """The options of the command, as its help explains them."""

    backend: str | None = None
    as_json: bool = False
    deadline_seconds: float = 8.0
    tries: bool = True


def doctor(options: DoctorOptions) -> int:
    """Looks, tries and prints; returns the exit code."""
    began = time.monotonic()
    here = look_around(_PROBE_SECONDS)
    findings = examine(here)
    asked_for = options.backend or _asked_for_in(here.environ.get(BACKEND, ""))
    backends = (options.backend,) if options.backend else BACKENDS
    trials = [try_backend(each, here, findings, options.deadline_seconds) for each in backends] if options.tries else []
    report = Report(findings, trials, asked_for, time.monotonic() - began)
    if options.as_json:
        print(json.dumps(as_dictionary(report), indent=2))
    else:
        show(report)
    return 0 if report.is_well else 1


def _asked_for_in(value: str) -> str | None:
    """Returns the backend that the environment asks for by name."""
    return value if value in BACKENDS else None
