"""What the user sets for a run by environment variables: limits, the debug mode, what is logged."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping

from gradsync.environment import (
    ALLOW_SHARED_GPU,
    COLLECTIVE_TIMEOUT_SECONDS,
    DEBUG,
    FLIGHT_RECORDER_ENTRIES,
    LOG,
)
from gradsync.errors import InvalidArgument
from gradsync.variable_values import value_of

_FLIGHT_RECORDER_ENTRIES, _MAX_FLIGHT_RECORDER_ENTRIES = 64, 1_000_000


def allows_shared_gpu(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether GRADSYNC_ALLOW_SHARED_GPU lets several ranks share a GPU.

    Raises:
        InvalidArgument: it is neither "0" nor "1".
    """
    return _is_set(ALLOW_SHARED_GPU, environ)


def asks_for_debug_mode(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether GRADSYNC_DEBUG asks for the debug mode.

    Raises:
        InvalidArgument: it is neither "0" nor "1".
    """
    return _is_set(DEBUG, environ)


def _is_set(name: str, environ: Mapping[str, str]) -> bool:
    text = value_of(environ, name) or "0"
    if text not in ("0", "1"):
        raise InvalidArgument(f"{name} needs to be 0 or 1, got {text!r}")
    return text == "1"


def flight_recorder_entries(environ: Mapping[str, str] = os.environ) -> int:
    """Gives how many collectives the flight recorder of a communicator remembers.

    Raises:
        InvalidArgument: GRADSYNC_FLIGHT_RECORDER_ENTRIES is not a number from 1.
    """
    text = value_of(environ, FLIGHT_RECORDER_ENTRIES)
    if text is None:
        return _FLIGHT_RECORDER_ENTRIES
    is_number = text.isascii() and text.isdecimal() and len(text) < 10
    if not is_number or not 1 <= int(text) <= _MAX_FLIGHT_RECORDER_ENTRIES:
        raise InvalidArgument(
            f"{FLIGHT_RECORDER_ENTRIES} needs to be a number of 1 to {_MAX_FLIGHT_RECORDER_ENTRIES}, got {text!r}"
        )
    return int(text)


def collective_timeout_seconds(seconds: float, environ: Mapping[str, str] = os.environ) -> float:
    """Gives how long a collective waits: what GRADSYNC_COLLECTIVE_TIMEOUT_SECONDS says, else the caller's `seconds`.

    Raises:
        InvalidArgument: the variable is no number above 0.
    """
    text = value_of(environ, COLLECTIVE_TIMEOUT_SECONDS)
    if text is None:
        return seconds
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 < found < math.inf:
        raise InvalidArgument(f"{COLLECTIVE_TIMEOUT_SECONDS} needs to be a number of seconds above 0, got {text!r}")
    return found


def log_level(environ: Mapping[str, str] = os.environ) -> str | None:
    """Gives the level of GRADSYNC_LOG as `logging` names it, or None when it is not set.

    Raises:
        InvalidArgument: GRADSYNC_LOG is not a level.
    """
    text = value_of(environ, LOG)
    if text is None:
        return None
    level = text.upper()
    if level not in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"):
        raise InvalidArgument(f"{LOG} needs to be debug, info, warning, error or critical, got {text!r}")
    return level


def configure_logging(environ: Mapping[str, str] = os.environ) -> None:
    """Shows the `gradsync` logger on standard error at the level of GRADSYNC_LOG; nothing when it is not set.

    Raises:
        InvalidArgument: GRADSYNC_LOG is not a level.
    """
    level = log_level(environ)
    if level is None:
        return
    import logging  # here, because start-up counts and most processes never come this far

    logger = logging.getLogger("gradsync")
    logger.setLevel(level)
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s: %(message)s"))
        logger.addHandler(handler)
