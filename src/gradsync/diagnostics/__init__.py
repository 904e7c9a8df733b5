"""Diagnostics: what a rank's last collectives were, where its threads are, and when it did what.

recorder.py has the last collectives, and stacks.py the stacks of threads: a rank's report to the others when a
collective does not end. compare.py finds the first collective in which ranks differ, for the rendezvous server while
ranks wait. trace.py writes a Chrome trace.
"""

from gradsync.diagnostics.recorder import (
    Entry,
    FlightRecorder,
    Recorded,
    Running,
    finish,
    names_text,
)
from gradsync.diagnostics.stacks import stack_report

__all__ = [
    "Entry",
    "FlightRecorder",
    "Recorded",
    "Running",
    "finish",
    "names_text",
    "stack_report",
]
