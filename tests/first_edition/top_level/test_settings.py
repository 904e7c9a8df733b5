"""What the user sets for a run by environment variables is checked, and counts."""

import logging

import pytest

from gradsync import environment, settings
from gradsync.errors import InvalidArgument


@pytest.fixture
def logger():
    found = logging.getLogger("gradsync")
    level, handlers = found.level, found.handlers[:]
    found.handlers[:] = []
    yield found
    found.setLevel(level)
    found.handlers[:] = handlers


def test_logging(logger, capsys):
    settings.configure_logging({})
    assert not logger.handlers
    settings.configure_logging({"GRADSYNC_LOG": "info"})
    settings.configure_logging({"GRADSYNC_LOG": "info"})
    logger.info("taking shm")
    logger.debug("unseen")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].endswith("gradsync INFO: taking shm")


def test_unknown_log_level(logger):
    with pytest.raises(InvalidArgument, match=r"GRADSYNC_LOG needs to be debug, info.*got 'loud'"):
        settings.configure_logging({"GRADSYNC_LOG": "loud"})


@pytest.mark.parametrize(
    ("name", "read"),
    [
        (environment.ALLOW_SHARED_GPU, settings.allows_shared_gpu),
        (environment.DEBUG, settings.asks_for_debug_mode),
    ],
)
def test_a_switch_is_0_or_1(name, read):
    assert [read({name: text}) for text in ("1", " 1 ", "0", "")] == [True, True, False, False]
    assert not read({})
    with pytest.raises(InvalidArgument, match=f"{name} needs to be 0 or 1, got 'true'"):
        read({name: "true"})


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "soon"])
def test_collective_timeout_of_the_environment_is_checked(text):
    environ = {environment.COLLECTIVE_TIMEOUT_SECONDS: text}
    with pytest.raises(InvalidArgument, match=r"needs to be a number of seconds above 0, got '"):
        settings.collective_timeout_seconds(300.0, environ)


def test_collective_timeout_of_the_environment_decides():
    environ = {environment.COLLECTIVE_TIMEOUT_SECONDS: "3600"}
    assert settings.collective_timeout_seconds(300.0, environ) == 3600
    assert settings.collective_timeout_seconds(300.0, {}) == 300
