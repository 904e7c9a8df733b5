"""Diagnostics: a rank's record of its collectives, its dumps, and what `gradsync trace` says of them.

recorder.py remembers the last collectives, tracing.py times their phases, stacks.py says where threads are. dump.py
writes all of it to a file and reads it back; triggers.py decides when. compare.py finds where ranks differ, for the
server while they wait and for report.py afterwards; chrome_trace.py draws.
"""

from gradsync.diagnostics.recorder import (
    Entry,
    FlightRecorder,
    Place,
    Recorded,
    Running,
    finish,
    names_text,
    seconds_text,
    size_text,
)
from gradsync.diagnostics.stacks import stack_report
from gradsync.diagnostics.triggers import (
    arm,
    dump_at_exception,
    dump_at_failure,
    dump_because,
    write_trace,
)

__all__ = [
    "Entry",
    "FlightRecorder",
    "Place",
    "Recorded",
    "Running",
    "arm",
    "dump_at_exception",
    "dump_at_failure",
    "dump_because",
    "finish",
    "names_text",
    "seconds_text",
    "size_text",
    "stack_report",
    "write_trace",
]
