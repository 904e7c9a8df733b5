"""Diagnostics: what a rank remembers of its collectives, what it writes down, and what the files of all ranks say.

The recorder remembers, tracing times phases, stacks says where the threads are, and dump writes all of it to a file.
The server compares ranks while they wait (compare), and `gradsync trace` when they have ended (command).
"""

from gradsync.diagnostics.dump import (
    arm,
    dump_at_exception,
    dump_at_failure,
    dump_because,
    write_trace,
)
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
