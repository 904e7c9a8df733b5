"""Times the flight recorder: an entry, and reading it."""

from gradsync.communicators.agreement import agreement_on
from gradsync.diagnostics.recorder import FlightRecorder
from gradsync.diagnostics.stacks import stack_report

BARRIER = agreement_on("barrier", (), None, "")


def test_an_entry_begun_and_ended(benchmark):
    recorder = FlightRecorder("world")

    def record():
        recorder.begin(BARRIER)
        recorder.end(False)

    benchmark(record)
    assert recorder.entries()[-1].ended is not None


def test_the_last_eight_as_text(benchmark):
    recorder = FlightRecorder("world")
    for _ in range(100):
        recorder.begin(BARRIER)
        recorder.end(False)
    assert len(benchmark(recorder.describe).splitlines()) == 8


def test_stack_report(benchmark):
    assert "test_stack_report" in benchmark(stack_report)
