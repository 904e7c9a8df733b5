"""gradsync's own variables: one table of their names, each with what it may hold, and the secret of the run.

launchers.py reads what launchers say of this process's rank. Nothing here or there changes os.environ.
"""

from __future__ import annotations

import errno
import math
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Generic, TypeVar

from gradsync.arguments import check_address
from gradsync.backends import BACKENDS, unknown_backend
from gradsync.errors import InvalidArgument
from gradsync.words import REMOVED, refuse_removed

HOW_TO_MAKE_A_SECRET_FILE = "(umask 077; python3 -c 'import secrets; print(secrets.token_hex(32))' > gradsync.secret)"
#: The name of the launcher's file in memory that holds the secret: its ranks read it by GRADSYNC_SECRET_FILE=fd:N.
SECRET_IN_MEMORY = "gradsync-secret"
_PREFIX = "GRADSYNC_"
_LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_MAX_RECORDER_ENTRIES = 1_000_000
_MIN_SECRET_BYTES = 16
_MAX_FILE_BYTES = 4096

T = TypeVar("T")


# -- What a variable may hold: functions of its name and its text -----------------------------------------------------


def value_of(environ: Mapping[str, str], name: str) -> str | None:
    """Returns the text of a variable without white space around it; None if it is not set, or blank."""
    return environ.get(name, "").strip() or None


def parse_integer(name: str, text: str, lowest: int = 0, highest: int = 10**9, why: str = "") -> int:
    """Returns an integer in a range; `why` says in the error where the upper limit is from, such as " (N - 1)".

    Raises:
        InvalidArgument: the text is no such integer.
    """
    is_number = text.isascii() and text.isdecimal() and len(text) < 11
    if not is_number or not lowest <= int(text) <= highest:
        raise InvalidArgument(f"{name} needs to be an integer from {lowest} to {highest}{why}, got {text!r}")
    return int(text)


def _switch(name: str, text: str) -> bool:
    if text not in ("0", "1"):
        raise InvalidArgument(f"{name} needs to be 0 or 1, got {text!r}")
    return text == "1"


def _seconds(name: str, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise InvalidArgument(f"{name} needs to be a finite number of seconds above 0, got {text!r}")
    return seconds


def _backend(name: str, text: str) -> str:
    if text not in BACKENDS:
        raise InvalidArgument(unknown_backend(text, f" in {name}"))
    return text


def _log_level(name: str, text: str) -> str:
    if text.upper() not in _LOG_LEVELS:
        raise InvalidArgument(f"{name} needs to be debug, info, warning, error or critical, got {text!r}")
    return text.upper()


def parse_secret(origin: str, text: str) -> bytes:
    """Returns the secret that a text holds in hexadecimal; the error names its origin, and never shows the text.

    Raises:
        InvalidArgument: the text is not hexadecimal, or the secret is too short.
    """
    try:
        secret = bytes.fromhex(text.strip())
    except ValueError:
        secret = b""
    if len(secret) < _MIN_SECRET_BYTES:
        raise InvalidArgument(
            f"{origin} needs to contain a secret: an even number of hexadecimal digits, at least "
            f"{2 * _MIN_SECRET_BYTES}; make one with: {HOW_TO_MAKE_A_SECRET_FILE}"
        ) from None
    return secret


# -- The table: docs/commands.md describes each for users -------------------------------------------------------------


class Variable(str, Generic[T]):
    """The name of a variable of gradsync, as text, which can read its value.

    Attributes:
        default: the value if the variable is not set, or blank.
    """

    __slots__ = ("_parse", "default")

    _parse: Callable[[str, str], T]
    default: T

    def __new__(cls, name: str, parse: Callable[[str, str], T], default: T) -> Variable[T]:
        self = super().__new__(cls, name)
        self._parse, self.default = parse, default
        return self

    def read(self, environ: Mapping[str, str] = os.environ) -> T:
        """Returns the value of the variable.

        Raises:
            InvalidArgument: the value is wrong; the error names the variable.
        """
        text = value_of(environ, self)
        return self.default if text is None else self._parse(self, text)


ADDRESS = Variable(
    "GRADSYNC_ADDRESS", lambda name, text: check_address(text, name), None
)  # a server is there: the launcher's, or `gradsync serve`
BACKEND = Variable("GRADSYNC_BACKEND", _backend, "auto")
ALLOW_SHARED_GPU = Variable("GRADSYNC_ALLOW_SHARED_GPU", _switch, False)
SECRET = Variable("GRADSYNC_SECRET", parse_secret, None)
SECRET_FILE = Variable("GRADSYNC_SECRET_FILE", lambda _name, path: read_secret_file(path), None)
DEBUG = Variable("GRADSYNC_DEBUG", _switch, False)
PLAIN_KERNELS = Variable("GRADSYNC_PLAIN_KERNELS", _switch, False)
COLLECTIVE_TIMEOUT_SECONDS = Variable("GRADSYNC_COLLECTIVE_TIMEOUT_SECONDS", _seconds, None)  # before the script's
LOG = Variable("GRADSYNC_LOG", _log_level, None)
FLIGHT_RECORDER_ENTRIES = Variable(
    "GRADSYNC_FLIGHT_RECORDER_ENTRIES", partial(parse_integer, lowest=1, highest=_MAX_RECORDER_ENTRIES), 64
)
TRACE = Variable("GRADSYNC_TRACE", lambda _name, folder: folder, None)

VARIABLES: tuple[Variable[object], ...] = tuple(v for v in list(globals().values()) if isinstance(v, Variable))
#: The variables of one run. A launcher sets its own for its ranks, whatever it has inherited.
OF_A_RUN = (ADDRESS, BACKEND, SECRET, SECRET_FILE)
_warned: set[str] = set()


def refused_variables(
    environ: Mapping[str, str] = os.environ, variables: Iterable[Variable[object]] = VARIABLES
) -> Iterator[tuple[str, InvalidArgument]]:
    """Yields (name, error) for each variable that gradsync no longer has, and for each of these with a wrong value."""
    for name in REMOVED["gradsync (variables)"]:
        try:
            if value_of(environ, name) is not None:
                refuse_removed("gradsync (variables)", name)
        except InvalidArgument as error:
            yield name, error
    for variable in variables:
        try:
            variable.read(environ)
        except InvalidArgument as error:
            yield variable, error


def check_removed_variables() -> None:
    """Raises InvalidArgument if a variable is set that gradsync no longer has; the error says what to do instead."""
    for _, error in refused_variables(variables=()):
        raise error


def check_variables() -> None:
    """Checks, in a launcher, what its ranks inherit, so that they do not all say the same; warns of unknown variables.

    Raises:
        InvalidArgument: a variable that ranks inherit has a wrong value, or gradsync no longer has it.
    """
    for _, error in refused_variables(variables=[variable for variable in VARIABLES if variable not in OF_A_RUN]):
        raise error
    warn_of_unknown_variables()


def unknown_variables(environ: Mapping[str, str] = os.environ) -> dict[str, str | None]:
    """Returns the variables GRADSYNC_* that gradsync has not, each with the one that was probably meant, or None."""
    from difflib import get_close_matches  # imported here: hardly any process needs it

    names = {name.removeprefix(_PREFIX): name for name in VARIABLES}
    near = {word: name for own, name in names.items() for word in own.split("_")} | names  # TIMEOUT alone is enough
    found: dict[str, str | None] = {}
    for name in sorted(environ):
        if name.startswith(_PREFIX) and name not in VARIABLES and name not in REMOVED["gradsync (variables)"]:
            close = get_close_matches(name.removeprefix(_PREFIX), near, n=1, cutoff=0.7)
            found[name] = near[close[0]] if close else None
    return found


def describe_unknown(meant: str | None) -> str:
    """Returns the warning about an unknown variable; `meant` is the one that was probably meant, or None."""
    advice = "; docs/commands.md lists all variables" if meant is None else f"; did you mean {meant}?"
    return f"gradsync has no such variable and ignores it{advice}"


def warn_of_unknown_variables() -> None:
    """Logs each unknown variable, once in a process."""
    for name, meant in unknown_variables().items():
        if name not in _warned:
            _warned.add(name)
            log_warning(f"gradsync: warning: {name}: {describe_unknown(meant)}")


def log_warning(text: str) -> None:
    """Logs a warning; for modules that do not import logging before they need it, so that ranks start fast."""
    import logging

    logging.getLogger("gradsync").warning(text)


def configure_logging() -> None:
    """Sets the level of the logger "gradsync" by GRADSYNC_LOG; gives it a handler for stderr if it has none.

    Raises:
        InvalidArgument: GRADSYNC_LOG is no level.
    """
    level = LOG.read()
    if level is None:
        return
    import logging  # imported here, so that ranks start fast

    logger = logging.getLogger("gradsync")
    logger.setLevel(level)
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s: %(message)s"))
        logger.addHandler(handler)


# -- The secret of the run --------------------------------------------------------------------------------------------


def read_secret() -> bytes | None:
    """Returns the secret of the run from GRADSYNC_SECRET, else from the file in GRADSYNC_SECRET_FILE, else None.

    Raises:
        InvalidArgument: the variable contains no secret, or the file is wrong (see read_secret_file).
    """
    return SECRET.read() or SECRET_FILE.read()


def read_secret_file(path: str) -> bytes:
    """Reads a hexadecimal secret from a file that other users can neither read nor write.

    Args:
        path: the path of the file; or "fd:N", the file in memory that a rank has inherited from gradsync's launcher.

    Raises:
        InvalidArgument: the file contains no secret, or cannot be read safely (see read_private_file).
    """
    text = _read_inherited(path) if path.startswith("fd:") else read_private_file(path)
    return parse_secret(f"secret file {path!r}", text)


def read_secret_option(path: str) -> bytes:
    """Reads the secret for the option `--secret-file`: from the file, or for "-" from one line of standard input.

    Raises:
        InvalidArgument: see `read_secret_file`; or standard input cannot be read, or contains no secret.
    """
    if path != "-":
        return read_secret_file(path)
    line = b""  # reads no more than one line, because a rank may read the rest
    try:
        while len(line) < _MAX_FILE_BYTES and not line.endswith(b"\n") and (byte := os.read(0, 1)):
            line += byte
    except OSError as error:  # e.g. standard input is closed
        raise InvalidArgument(f"the secret cannot be read from standard input: {error.strerror}") from None
    return parse_secret("standard input", line.decode("ascii", "replace"))


def read_private_file(path: str) -> str:
    """Reads a short text from a file that only this user can access.

    Args:
        path: the path of the file. A symbolic link is an error, because another user may have made it.

    Raises:
        InvalidArgument: the file cannot be opened, is not a regular file, is not owned by this user, is accessible to
            other users, or is too long.
    """
    # O_NONBLOCK: opening a FIFO must not wait for a writer.
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:  # the error of O_NOFOLLOW for a symbolic link
            raise InvalidArgument(f"secret file {path!r} is a symbolic link; name the file itself") from None
        raise InvalidArgument(
            f"secret file {path!r} cannot be opened: {error.strerror}; make one with: {HOW_TO_MAKE_A_SECRET_FILE}"
        ) from None
    try:
        # The open file is checked, not its path, where another file may be by now.
        status = os.fstat(descriptor)
        mode, user = stat.S_IMODE(status.st_mode), os.geteuid()
        if not stat.S_ISREG(status.st_mode):
            raise InvalidArgument(f"secret file {path!r} needs to be a regular file")
        if status.st_size > _MAX_FILE_BYTES:
            raise InvalidArgument(
                f"secret file {path!r} needs to contain a secret of at most {_MAX_FILE_BYTES} bytes, "
                f"it has {status.st_size}"
            )
        if status.st_uid != user:
            raise InvalidArgument(f"secret file {path!r} needs to belong to user {user}, it belongs to {status.st_uid}")
        if mode & 0o077:
            raise InvalidArgument(f"secret file {path!r} needs mode 0600, got {mode:04o}; run: chmod 600 {path}")
        return os.read(descriptor, _MAX_FILE_BYTES).decode("ascii", "replace")
    finally:
        os.close(descriptor)


def _read_inherited(name: str) -> str:
    """Reads the file in memory that gradsync's launcher hands to its ranks, without moving its position: all share it.

    A rank keeps the descriptor over exec. A process that a rank has started may have the variable without it.
    """
    number = name.removeprefix("fd:")
    try:
        is_ours = os.readlink(f"/proc/self/fd/{number}").startswith(f"/memfd:{SECRET_IN_MEMORY} ")
        if is_ours and os.fstat(int(number)).st_uid == os.geteuid():
            return os.pread(int(number), _MAX_FILE_BYTES, 0).decode("ascii", "replace")
    except (OSError, ValueError):
        pass
    raise InvalidArgument(
        f"{SECRET_FILE}={name} is for the ranks of one launcher, and this process is no rank: it is a program that a "
        "rank has started. To start a separate run, unset all variables whose names begin with GRADSYNC_"
    )
