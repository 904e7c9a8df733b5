"""Probes end by their deadline, with all that they have started."""

import gc
import time

from gradsync.doctor.facts import ask_all


def test_a_script_that_hangs_in_what_it_has_started_is_ended_by_the_deadline(tmp_path):
    """As mpiexec may be one: who is killed alone leaves a process behind that holds its output open."""
    script = tmp_path / "mpiexec"
    script.write_text("#!/bin/sh\nsleep 60\necho ended\n")
    script.chmod(0o755)
    began = time.monotonic()
    answers = ask_all(str(script), 1.0)
    assert answers["mpiexec"] == {"error": "no answer within 1 s"}
    assert time.monotonic() - began < 30


def test_output_that_a_process_of_another_session_holds_open_is_closed(tmp_path):
    """Where that one cannot be ended, or ends late, on a busy machine: a warning would tell what stays open."""
    script = tmp_path / "mpiexec"
    script.write_text("#!/bin/sh\nsetsid sleep 3 &\nsleep 60\n")
    script.chmod(0o755)
    assert ask_all(str(script), 1.0)["mpiexec"] == {"error": "no answer within 1 s"}
    gc.collect()
