"""Probes end by their deadline, with all that they have started."""

import time

from gradsync.doctor.probes import ask_all


def test_a_script_that_hangs_in_what_it_has_started_is_ended_by_the_deadline(tmp_path):
    """As mpiexec may be one: who is killed alone leaves a process behind that holds its output open."""
    script = tmp_path / "mpiexec"
    script.write_text("#!/bin/sh\nsleep 60\necho ended\n")
    script.chmod(0o755)
    began = time.monotonic()
    answers = ask_all(str(script), None, 1.0)
    assert answers["mpiexec"] == {"error": "no answer within 1 s"}
    assert time.monotonic() - began < 30
