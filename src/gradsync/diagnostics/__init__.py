"""Diagnostics: each rank's record of its collectives, its dumps, and the report that `gradsync trace` makes from dumps.

recorder.py records the last collectives, tracing.py times their phases, and stacks.py describes the stacks of threads.
dump.py writes these records to a file and reads the file; triggers.py decides when a process writes a dump. compare.py
finds the first collective in which ranks differ: the rendezvous server uses compare.py while ranks wait, and report.py
uses compare.py on dumps. chrome_trace.py converts dumps to a Chrome trace.
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
    "stack_report",
    "write_trace",
]
