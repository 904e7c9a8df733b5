"""Variables that gradsync does not know are told once for a run, with the name that was probably meant."""

from __future__ import annotations

import logging

import pytest

from gradsync import unknown_variables
from gradsync.unknown_variables import nearest_variable, warn_of_unknown_variables


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("GRADSYNC_TIMOUT", "GRADSYNC_COLLECTIVE_TIMEOUT_SECONDS"),
        ("GRADSYNC_TIMEOUT", "GRADSYNC_COLLECTIVE_TIMEOUT_SECONDS"),
        ("GRADSYNC_BACKED", "GRADSYNC_BACKEND"),
        ("GRADSYNC_SECRETFILE", "GRADSYNC_SECRET_FILE"),
        ("GRADSYNC_TRACE_DIR", "GRADSYNC_TRACE"),
        ("GRADSYNC_RECORDER_ENTRIES", "GRADSYNC_FLIGHT_RECORDER_ENTRIES"),
        ("GRADSYNC_MAX_RESTART", "GRADSYNC_MAX_RESTARTS"),
        ("GRADSYNC_", None),
        ("GRADSYNC_HEARTBEAT", None),
    ],
)
def test_the_variable_that_was_meant_is_found(name: str, meant: str | None) -> None:
    assert nearest_variable(name) == meant


def test_each_is_told_once_in_a_process(caplog, monkeypatch) -> None:
    monkeypatch.setattr(unknown_variables, "_told", set())
    environ = {"GRADSYNC_BACKED": "shm", "GRADSYNC_BACKEND": "shm", "GRADSYNC_TEST_X": "1", "PATH": "/bin"}
    with caplog.at_level(logging.WARNING, logger="gradsync"):
        for _ in range(2):
            warn_of_unknown_variables(environ)
        warn_of_unknown_variables(environ | {"GRADSYNC_VERBOSE": "1"})
    assert [record.getMessage().split(": ")[2] for record in caplog.records] == ["GRADSYNC_BACKED", "GRADSYNC_VERBOSE"]
