"""Failures of the launcher, the server, the rendezvous and of arguments and results; and ends on demand."""

from __future__ import annotations

import signal
from functools import partial

from failures import meetings
from failures.observation import Row
from failures.rows_of_ranks import BY_SIGKILL, FAILED, KILLED, NAMES_RANK_1, RANK_1
from failures.runs import LAUNCHER, call, freeze_a_rank, interrupt_twice, run, signalled, stop_launcher


def signals() -> list[Row]:
    """A signal ends the run, within the grace of the ranks and a second."""
    return [
        Row(
            "ctrl-c",
            "Ctrl-C",
            "all_reduce",
            2,
            run(2, "all_reduce", "none", strike=signalled(signal.SIGINT)),
            report=("^gradsync: stopping 2 ranks",),
            exit_codes={LAUNCHER: 130},
            down_within=2.0,
        ),
        Row(
            "ctrl-c-twice",
            "Ctrl-C again, ranks ignore it",
            "all_reduce",
            2,
            run(2, "all_reduce", "none", "--stubborn", strike=interrupt_twice),
            exit_codes={LAUNCHER: 130},
            down_within=0.2,
        ),
        *(_asked_to_end(number, stubborn) for number in (signal.SIGTERM, signal.SIGHUP) for stubborn in (False, True)),
        Row(
            "unkillable",
            "a rank cannot be killed; SIGTERM",
            "all_reduce",
            2,
            freeze_a_rank(2),
            report=(rf"{RANK_1} could not be killed",),
            exit_codes={LAUNCHER: 128 + signal.SIGTERM},
            down_within=3.0,
        ),
    ]


def _asked_to_end(number: signal.Signals, stubborn: bool) -> Row:
    options = ("--stubborn",) if stubborn else ()
    return Row(
        number.name.lower() + ("-ignored" if stubborn else ""),
        f"{number.name} to the launcher" + (", ranks ignore it" if stubborn else ""),
        "all_reduce",
        2,
        run(2, "all_reduce", "none", *options, grace=1.0, strike=signalled(number)),
        exit_codes={LAUNCHER: 128 + number},
        down_within=2.0,
    )


def abandoned() -> list[Row]:
    """Ranks have started processes, double-forked ones too; or the launcher is gone."""
    server_gone = partial(
        Row, phase="all_reduce", ranks=2, raising=(0, 1), errors=("RendezvousError",), names="rendezvous server"
    )
    return [
        Row(
            "launcher-killed",
            "SIGKILL to the launcher, grandchildren",
            "all_reduce",
            2,
            run(2, "all_reduce", "none", "--children", strike=signalled(signal.SIGKILL)),
            exit_codes={LAUNCHER: -signal.SIGKILL},
            down_within=1.0,
        ),
        Row(
            "killed-with-children",
            "SIGKILL, grandchildren",
            "all_reduce",
            2,
            run(2, "all_reduce", "kill", "--children"),
            raising=(0,),
            errors=("RankFailed",),
            names=NAMES_RANK_1,
            report=(KILLED,),
            exit_codes=BY_SIGKILL,
            told_within=0.5,
            down_within=1.0,
        ),
        server_gone(
            "launcher-stopped",
            "SIGSTOP to the launcher",
            play=run(2, "all_reduce", "none", strike=stop_launcher),
            told_within=3.0,
        ),
        server_gone("server-killed", "SIGKILL to the server", play=meetings.server_killed, told_within=0.5),
    ]


def refusals() -> list[Row]:
    """Processes that must not join, or do not."""
    refused = partial(Row, phase="init", ranks=2)
    unharmed = {"rank 0": 0, "rank 1": 0}
    return [
        refused(
            "slow-joiner",
            "does not join; limit 1 s",
            play=run(2, "before-init", "stall", "--timeout", "1"),
            raising=(0,),
            errors=("RendezvousTimeout",),
            names=NAMES_RANK_1,
            report=(r"RendezvousTimeout: .*missing: rank 1\b",),
            exit_codes=FAILED,
            begins_with_waiting=True,
            told_within=1.1,
        ),
        refused(
            "duplicate-rank",
            "duplicate rank",
            play=meetings.duplicate_rank,
            raising=(1,),
            errors=("RendezvousError",),
            names=r"rank 1\b.*(already|twice|taken)",
            exit_codes=unharmed,
            ends_run=False,
            told_within=0.1,
        ),
        refused(
            "wrong-world-size",
            "wrong world size",
            play=meetings.wrong_world_size,
            raising=(0,),
            errors=("RendezvousError",),
            names=r"(?s)(\b2\b.*\b3\b|\b3\b.*\b2\b)",
            exit_codes=unharmed,
            ends_run=False,
            told_within=0.1,
        ),
        refused(
            "another-run",
            "server of another run",
            play=meetings.another_run,
            raising=(0,),
            errors=("AuthenticationError",),
            names="another run",
            exit_codes=unharmed,
            ends_run=False,
            told_within=0.2,
        ),
        refused(
            "port-in-use",
            "port in use",
            play=meetings.port_in_use,
            raising=(0,),
            errors=("RendezvousError",),
            names=r"port \d+ on \S+ is in use",
            told_within=0.1,
        ),
    ]


def values() -> list[Row]:
    """Arguments and results between a script and its ranks that cannot be sent, or are very large."""
    return [
        Row(
            "unpicklable-function",
            "function that does not pickle",
            "gs.launch",
            2,
            call("unpicklable-function"),
            report=("^InvalidArgument: .*pickle",),
            exit_codes=FAILED,
            told_within=0.1,
        ),
        Row(
            "unpicklable-result",
            "return value that does not pickle",
            "gs.launch",
            2,
            call("unpicklable-result"),
            report=(r"worker\[1\] failed", "pickle", r"^kept: \{0: 'the result of rank 0'\}"),
            exit_codes=FAILED,
            told_within=0.3,
        ),
        Row(
            "large-result-256",
            "return value of 256 MB",
            "gs.launch",
            2,
            call("large-result", "256"),
            report=(rf"^returned \[20, {256 << 20}\]",),
            exit_codes={LAUNCHER: 0},
            ends_run=False,
        ),
    ]
