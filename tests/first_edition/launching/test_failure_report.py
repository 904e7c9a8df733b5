import os
import signal
from dataclasses import replace

from gradsync.launching.outcome import Outcome, RankOutcome, failure_text
from gradsync.launching.rank_report import ErrorReport


def told(*ranks):
    return failure_text(Outcome(ranks)).splitlines()


def failed(rank, summary, *, missed_rank=None, is_consequence=True):
    error = ErrorReport(f"Traceback\n{summary}\n", summary, is_consequence, missed_rank)
    return RankOutcome(rank, 100 + rank, 1, error=error, order=rank)


def test_equal_failures_share_a_line_and_the_cause_is_last():
    consequences = [failed(rank, f"RankFailed: rank {rank}/17: rank 1 failed:") for rank in range(17) if rank != 1]
    cause = failed(1, "ValueError: boom", is_consequence=False)
    consequences[-1] = failed(16, "RankFailed: something else")
    assert told(consequences[0], cause, *consequences[1:]) == [
        "gradsync: ranks 0, 2-15 (pids 100, 102-115) also failed: RankFailed: rank 1 failed",
        "gradsync: rank 16 (pid 116) also failed: RankFailed: something else",
        f"gradsync: rank 1 (pid 101 on {os.uname().nodename}) failed with exit code 1:",
        "Traceback",
        "ValueError: boom",
    ]


def test_rank_that_had_ended_is_named_where_it_was_missed():
    ended = RankOutcome(1, 101, 0)
    line = "gradsync: rank 1 (pid 101) had ended with exit code 0"
    assert told(failed(0, "RankFailed: x", missed_rank=1), ended)[0] == line
    assert line not in told(failed(0, "RankFailed: x"), ended)


def test_a_fault_in_machine_code_comes_with_a_way_to_see_where():
    fault = RankOutcome(1, 101, -signal.SIGSEGV, order=0)
    who = f"gradsync: rank 1 (pid 101 on {os.uname().nodename}) was killed by"
    assert told(fault) == [f"{who} SIGSEGV; with PYTHONFAULTHANDLER=1 Python tells where"]
    shown = replace(fault, last_lines=("Fatal Python error: Segmentation fault", '  File "train.py", line 7'))
    assert told(shown)[-1] == f"{who} SIGSEGV"
    assert told(replace(fault, exit_code=-signal.SIGKILL)) == [f"{who} SIGKILL"]


def test_rank_that_a_signal_held_is_named():
    held = RankOutcome(1, 101, -15, order=1, was_stopped=True, was_found_stopped=True)
    line = "gradsync: rank 1 (pid 101) stood still, stopped by a signal (SIGSTOP?)"
    assert line in told(failed(0, "RendezvousTimeout: missing: rank 1"), held)
