"""The environment of this process: every GRADSYNC_* variable in one table, who this process is, and the run's secret.

Our launcher writes some of these variables for the ranks it starts; `init_process_group` reads them. The secret of a
run never stays in the environment: it is held privately in this module.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Generic, NamedTuple, TypeVar

from gradsync.arguments import check_address
from gradsync.errors import InvalidArgument
from gradsync.launchers import (
    TORCHRUN,
    LauncherVariables,
    Place,
    find_place,
    first_host,
    hints_of_launcher,
    name_run,
    read_port,
    step_port,
    value_of,
    variables_of_mpi,
)

#: What a backend may be called, wherever one is named.
BACKENDS = ("auto", "nccl", "shm", "mpi", "local")
HOW_TO_MAKE_A_SECRET_FILE = "(umask 077; python3 -c 'import secrets; print(secrets.token_hex(32))' > gradsync.secret)"
_PREFIX = "GRADSYNC_"
_LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_MAX_RECORDER_ENTRIES = 1_000_000
_MIN_SECRET_BYTES = 16
_MAX_FILE_BYTES = 4096

T = TypeVar("T")


# -- How the text of a variable is read: (name of the variable, text) -> value ----------------------------------------


def _text(_name: str, text: str) -> str:
    return text


def _integer(lowest: int, highest: int = 10**9) -> Callable[[str, str], int]:
    def read(name: str, text: str) -> int:
        is_number = text.isascii() and text.isdecimal() and len(text) < 11
        if not is_number or not lowest <= int(text) <= highest:
            raise InvalidArgument(f"{name} needs to be a number of {lowest} to {highest}, got {text!r}")
        return int(text)

    return read


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
        raise InvalidArgument(f"{name} needs to be a number of seconds above 0, got {text!r}")
    return seconds


def _backend(name: str, text: str) -> str:
    if text not in BACKENDS:
        raise InvalidArgument(f"unknown backend {text!r} in {name}: use one of {', '.join(BACKENDS)}")
    return text


def _log_level(name: str, text: str) -> str:
    if text.upper() not in _LOG_LEVELS:
        raise InvalidArgument(f"{name} needs to be debug, info, warning, error or critical, got {text!r}")
    return text.upper()


def _address(name: str, text: str) -> str:
    return check_address(text, name)


def parse_secret(origin: str, text: str) -> bytes:
    """Returns a secret that was written in hexadecimal.

    Args:
        origin: where it came from; errors name it, and never quote the text.
        text: the digits, with white space around them allowed.

    Raises:
        InvalidArgument: not hexadecimal, or too short to be a secret.
    """
    try:
        secret = bytes.fromhex(text.strip())
    except ValueError:
        secret = b""
    if len(secret) < _MIN_SECRET_BYTES:
        raise InvalidArgument(
            f"{origin} needs to hold a secret of at least {2 * _MIN_SECRET_BYTES} hexadecimal digits; "
            f"make one with: {HOW_TO_MAKE_A_SECRET_FILE}"
        ) from None
    return secret


def _secret_of_file(_name: str, path: str) -> bytes:
    return read_secret_file(path)


# -- The table --------------------------------------------------------------------------------------------------------


class Variable(str, Generic[T]):
    """A variable of gradsync: a text, its name, that knows how to read what is set.

    Attributes:
        default: its value where it is not set.
        help: what it is for, as docs/environment.md shows it.
    """

    __slots__ = ("_parse", "default", "help")

    _parse: Callable[[str, str], T]
    default: T
    help: str

    def __new__(cls, name: str, parse: Callable[[str, str], T], default: T, help: str) -> Variable[T]:
        self = super().__new__(cls, name)
        self._parse, self.default, self.help = parse, default, help
        return self

    def read(self, environ: Mapping[str, str] = os.environ) -> T:
        """Returns its value; the default where it is not set, or empty.

        Raises:
            InvalidArgument: it is not what it needs to be; the text names it.
        """
        text = value_of(environ, self)
        return self.default if text is None else self._parse(self, text)

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)  # the name is what travels to other processes


RANK = Variable(
    "GRADSYNC_RANK", _integer(0), None, "This process's rank, 0 .. world size - 1; set by our launcher, beside RANK."
)
WORLD_SIZE = Variable(
    "GRADSYNC_WORLD_SIZE", _integer(1), None, "Number of ranks of the run; set by our launcher, beside WORLD_SIZE."
)
LOCAL_RANK = Variable(
    "GRADSYNC_LOCAL_RANK",
    _integer(0),
    None,
    "This process's number among the ranks of its machine; set by our launcher, beside LOCAL_RANK.",
)
LOCAL_WORLD_SIZE = Variable(
    "GRADSYNC_LOCAL_WORLD_SIZE",
    _integer(1),
    None,
    "Number of ranks on this machine; set by our launcher, beside LOCAL_WORLD_SIZE.",
)
ADDRESS = Variable("GRADSYNC_ADDRESS", _address, None, "host:port of the rendezvous server.")
HOSTED = Variable(
    "GRADSYNC_HOSTED",
    _switch,
    False,
    '"1" when a server (our launcher\'s, or `gradsync serve`) runs at GRADSYNC_ADDRESS: rank 0 hosts none.',
)
START = Variable(
    "GRADSYNC_START",
    _text,
    None,
    "Which start of the ranks this one is of, where the launchers of several machines share a server with them.",
)
BACKEND = Variable(
    "GRADSYNC_BACKEND",
    _backend,
    "auto",
    'Backend that `init_process_group("auto")` takes: auto, shm, nccl, mpi or local.',
)
ALLOW_SHARED_GPU = Variable(
    "GRADSYNC_ALLOW_SHARED_GPU", _switch, False, '"1" lets several ranks share a GPU through NCCL; for tests.'
)
SECRET = Variable(
    "GRADSYNC_SECRET",
    parse_secret,
    None,
    "Secret of the run in hexadecimal; removed from the environment when it is read.",
)
SECRET_FILE = Variable(
    "GRADSYNC_SECRET_FILE",
    _secret_of_file,
    None,
    "Path of a file that holds the secret in hexadecimal; must be the user's own, mode 0600.",
)
RESTART_COUNT = Variable(
    "GRADSYNC_RESTART_COUNT", _integer(0), 0, "How often our launcher has started all ranks again."
)
MAX_RESTARTS = Variable(
    "GRADSYNC_MAX_RESTARTS", _integer(0), 0, "How often our launcher starts all ranks again at most."
)
STATE_DIR = Variable(
    "GRADSYNC_STATE_DIR",
    _text,
    None,
    "Directory that outlives a restart, where a script leaves what it needs to resume.",
)
COLLECTIVE_TIMEOUT_SECONDS = Variable(
    "GRADSYNC_COLLECTIVE_TIMEOUT_SECONDS",
    _seconds,
    None,
    "How many seconds a collective waits for a rank, whatever the script says; for a long stay in a debugger.",
)
LOG = Variable(
    "GRADSYNC_LOG", _log_level, None, "Level of the `gradsync` logger: debug, info, warning, error or critical."
)
FLIGHT_RECORDER_ENTRIES = Variable(
    "GRADSYNC_FLIGHT_RECORDER_ENTRIES",
    _integer(1, _MAX_RECORDER_ENTRIES),
    64,
    "How many collectives the flight recorder of each communicator remembers.",
)
DUMP_DIR = Variable(
    "GRADSYNC_DUMP_DIR",
    _text,
    None,
    "Folder for dumps of the flight recorder: when a collective fails, when a rank raises, when another rank misses "
    "this one, at Ctrl-C, and on SIGUSR2.",
)
TRACE = Variable(
    "GRADSYNC_TRACE",
    _text,
    None,
    "Folder into which each rank writes, at its end, when its collectives packed, waited, reduced and split.",
)
DEBUG = Variable(
    "GRADSYNC_DEBUG",
    _switch,
    False,
    '"1" has ranks agree on every collective, and finds gradients that are written to while gradsync has them.',
)

#: All of them, in the order of the documentation.
VARIABLES: tuple[Variable[object], ...] = tuple(v for v in list(globals().values()) if isinstance(v, Variable))
#: Those that a launcher sets anew for each run, whatever was there before.
OF_A_RUN = (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, ADDRESS, HOSTED, START, BACKEND, SECRET, SECRET_FILE)
_OURS = LauncherVariables("gradsync", RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, (ADDRESS, HOSTED))
# What torchrun, and our launcher likewise, set beside a rank's place.
_BESIDE_TORCHRUN = {"GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE"}
_NO_TLS = (
    "the rendezvous has no TLS any more: unset it, and keep others from listening with a private network or an SSH "
    "tunnel (docs/security.md)"
)
_REMOVED = {f"{_PREFIX}{name}": _NO_TLS for name in ("TLS_CERTIFICATE", "TLS_KEY", "TLS_CA")}  # what to do in place
_OF_TESTS = (f"{_PREFIX}STAND_IN_", f"{_PREFIX}TEST_")  # what this project's own tests set
_told: set[str] = set()


# -- What is set, and wrong -------------------------------------------------------------------------------------------


def refused_variables(
    environ: Mapping[str, str] = os.environ, variables: Iterable[Variable[object]] = VARIABLES
) -> Iterator[tuple[str, InvalidArgument]]:
    """Yields what is set and has gone, or is one of `variables` and cannot be read; each with what to do."""
    for name, advice in _REMOVED.items():
        if value_of(environ, name) is not None:
            yield name, InvalidArgument(f"{name} is set, but {advice}")
    for variable in variables:
        try:
            variable.read(environ)
        except InvalidArgument as error:
            yield variable, error


def unknown_variables(environ: Mapping[str, str] = os.environ) -> dict[str, str | None]:
    """Returns the names that begin as gradsync's do and never were any, each with the one that was probably meant."""
    known = {*VARIABLES, *_REMOVED}
    found = sorted(n for n in environ if n.startswith(_PREFIX) and n not in known and not n.startswith(_OF_TESTS))
    return {name: _nearest_variable(name) for name in found}


def describe_unknown(meant: str | None) -> str:
    """Returns that there is no such variable, and which was probably meant."""
    if meant is None:
        return "no such variable, so it does nothing; docs/environment.md lists all that there are"
    return f"no such variable, so it does nothing: did you mean {meant}?"


def check_removed_variables(environ: Mapping[str, str] = os.environ) -> None:
    """Refuses to go on without what a variable once did.

    Raises:
        InvalidArgument: one is set that has gone; the text says what to do in its place.
    """
    for _, error in refused_variables(environ, ()):
        raise error


def check_variables(environ: Mapping[str, str] = os.environ) -> None:
    """Looks at all variables before ranks start, so that a launcher says once what each rank would say.

    Raises:
        InvalidArgument: one that ranks inherit cannot be read, or has gone.
    """
    for _, error in refused_variables(environ, [variable for variable in VARIABLES if variable not in OF_A_RUN]):
        raise error
    warn_of_unknown_variables(environ)


def warn_of_unknown_variables(environ: Mapping[str, str] = os.environ) -> None:
    """Logs each unknown one, once in this process; in a rank that our launcher has started, that one has."""
    if RANK in environ:
        return
    for name, meant in unknown_variables(environ).items():
        if name not in _told:
            _told.add(name)
            _warn(f"warning: {name}: {describe_unknown(meant)}")


def _warn(text: str) -> None:
    import logging  # here, because start-up counts

    logging.getLogger("gradsync").warning("gradsync: %s", text)


def _nearest_variable(name: str) -> str | None:
    """Returns the variable that was probably meant: one spelt alike, one that says more or less, one of words alike."""
    from difflib import get_close_matches  # here: hardly any process needs it

    def has_words_like(known: str) -> bool:
        return all(get_close_matches(word, known.split("_"), n=1, cutoff=0.75) for word in own.split("_"))

    own = name.removeprefix(_PREFIX)  # which all of them share, and which would make any two look alike
    known = sorted(each.removeprefix(_PREFIX) for each in VARIABLES)
    kin = [each for each in known if own and (own in each or each in own)]
    for candidates, cutoff in ((known, 0.8), (kin, 0.0), (list(filter(has_words_like, known)), 0.0), (known, 0.6)):
        close = get_close_matches(own, candidates, n=1, cutoff=cutoff)
        if close:
            return _PREFIX + close[0]
    return None


def configure_logging(environ: Mapping[str, str] = os.environ) -> None:
    """Shows the `gradsync` logger on standard error at the level of GRADSYNC_LOG; nothing when it is not set.

    Raises:
        InvalidArgument: GRADSYNC_LOG is not a level.
    """
    level = LOG.read(environ)
    if level is None:
        return
    import logging  # here, because start-up counts and most processes never come this far

    logger = logging.getLogger("gradsync")
    logger.setLevel(level)
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s: %(message)s"))
        logger.addHandler(handler)


# -- Who is this process ----------------------------------------------------------------------------------------------


class RankEnvironment(NamedTuple):
    """What the environment says of this process's place in the run.

    Attributes:
        rank: number of this process in the run, 0 .. world_size - 1.
        world_size: number of processes in the run.
        local_rank: number of this process on its machine; the rank, where no variable tells it.
        local_world_size: number of processes on this machine; the world size, where no variable tells it.
        address: host:port of the rendezvous server, or None.
        secret: secret of the run, or None. Never shown in the repr.
        hosted: whether a server runs at `address` already: our launcher's, or `gradsync serve`.
        master_addr: MASTER_ADDR; without it the first host of a Slurm step over several hosts, else None.
        master_port: MASTER_PORT, or one that such a step's number gives, or None; it belongs to the user, not to the
            rendezvous server.
        source: who set the variables: "gradsync", "RANK" (torchrun or by hand), "Open MPI", "PMI" or "Slurm"; "MPI"
            where MPI itself was asked, "arguments" where nobody was.
        run_name: name of the run among those of this machine; only where all ranks are on it, and mpiexec or srun
            did not tell where to meet.
        start: which start of the ranks this one is of, where the server is also that of several launchers; else None.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    address: str | None = None
    secret: bytes | None = None
    hosted: bool = False
    master_addr: str | None = None
    master_port: int | None = None
    source: str = ""
    run_name: str | None = None
    start: str | None = None

    def __repr__(self) -> str:
        shown = (f"{name}={value!r}" for name, value in self._asdict().items() if name != "secret")
        return f"RankEnvironment({', '.join(shown)})"


def read_environment(environ: MutableMapping[str, str] = os.environ) -> RankEnvironment | None:
    """Reads who this process is, from the first launcher below that left its variables.

    | precedence | launcher | variables |
    | --- | --- | --- |
    | 1 | gradsync | `GRADSYNC_RANK`, `_WORLD_SIZE`, `_LOCAL_RANK`, `_LOCAL_WORLD_SIZE` |
    | 2 | torchrun, or by hand | `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE` |
    | 3 | mpiexec of Open MPI | `OMPI_COMM_WORLD_RANK`, `_SIZE`, `_LOCAL_RANK`, `_LOCAL_SIZE` |
    | 4 | mpiexec of MPICH or Intel MPI (PMI) | `PMI_RANK`, `PMI_SIZE`, `MPI_LOCALRANKID`, `MPI_LOCALNRANKS` |
    | 5 | srun (Slurm) | `SLURM_PROCID`, `SLURM_STEP_NUM_TASKS` or `SLURM_NTASKS`, `SLURM_LOCALID` |

    1 to 4 must agree on rank and world size where several are set: otherwise one launcher was started where another's
    variables were set, and which of them is the outer one cannot be told. Two cases are clear. Slurm's variables are
    inherited by all that runs in a step, so they count alone, or complete another launcher's. Where mpiexec started
    torchrun's agents, one on each machine, torchrun's variables count.

    MASTER_ADDR, MASTER_PORT and the other GRADSYNC_* variables are read alike for all of them.
    GRADSYNC_SECRET is removed from `environ`.

    Args:
        environ: the variables.

    Returns:
        The place of this process, or None when no launcher left its variables.

    Raises:
        InvalidArgument: a variable is malformed, out of range, or lacks its counterpart, or two launchers name
            different places; the text names the variables.
    """
    place = find_place(environ, _OURS)
    return None if place is None else _complete(environ, place)


def launched_world_size(environ: Mapping[str, str] = os.environ) -> int | None:
    """Returns how many ranks the launcher has started to which this process belongs; None where there is none.

    Raises:
        InvalidArgument: as `read_environment`.
    """
    place = find_place(environ, _OURS)
    return None if place is None else place.world_size


def without_launcher(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns the variables less those by which a launcher tells a process its place."""
    inherited = {*OF_A_RUN, *TORCHRUN.set_in(environ), *variables_of_mpi(environ), *_BESIDE_TORCHRUN}
    prefixes = ("TORCHELASTIC_", "SLURM_")
    return {name: value for name, value in environ.items() if name not in inherited and not name.startswith(prefixes)}


def is_launched() -> bool:
    """Whether a launcher has told this process which rank it is: gradsync's, torchrun, mpiexec or srun.

    A script that is to run by itself too takes `"auto" if gs.is_launched() else "local"` as its backend.

    Raises:
        InvalidArgument: the variables of launchers are malformed, or contradict each other.
    """
    return read_environment() is not None


def alone() -> RankEnvironment:
    """Returns the place of the only rank."""
    return RankEnvironment(0, 1, 0, 1, source="arguments")


def alone_without_launcher(environ: Mapping[str, str] = os.environ) -> RankEnvironment:
    """Returns the place of a process that nobody has started as a rank, and says so in one line.

    Raises:
        InvalidArgument: something hints at a launcher; the text names it.
    """
    hints: list[str] = [name for name in OF_A_RUN if name != BACKEND and value_of(environ, name) is not None]
    hints += hints_of_launcher(environ)
    if hints:
        raise no_rank_is_known(f"{hints[0]} is set, as a launcher does, but not RANK and WORLD_SIZE")
    unknown = unknown_variables(environ)
    _told.update(unknown)
    _warn(
        "no launcher has started this process, so it is a world of one rank (two: gradsync run -n 2 script.py)"
        + "".join(f"; {name}: {describe_unknown(meant)}" for name, meant in unknown.items())
    )
    return alone()


def no_rank_is_known(reason: str) -> InvalidArgument:
    """Returns the error for a process that is to be a rank, and nobody says which."""
    return InvalidArgument(
        f"no rank is known: {reason}. Start the script with `gradsync run -n 2 script.py` or `mpiexec -n 2 python "
        'script.py`, pass rank= and world_size=, or, for one process, use GRADSYNC_BACKEND=local or backend="local"'
    )


def _complete(environ: MutableMapping[str, str], place: Place) -> RankEnvironment:
    """Adds to a place what is read alike for every launcher, and where to meet if only the launcher knows."""
    address = ADDRESS.read(environ)
    master_addr, master_port, run_name = value_of(environ, "MASTER_ADDR"), read_port(environ, "MASTER_PORT"), None
    if place.world_size > 1 and not address and not (master_addr and master_port):
        if place.local_world_size == place.world_size:
            run_name = name_run(environ, place.source)
        elif place.source == "Slurm":
            master_addr, master_port = master_addr or first_host(environ), master_port or step_port(environ)
    return RankEnvironment(
        rank=place.rank,
        world_size=place.world_size,
        local_rank=place.rank if place.local_rank is None else place.local_rank,
        local_world_size=place.local_world_size or place.world_size,
        address=address,
        secret=take_secret(environ),
        hosted=HOSTED.read(environ),
        master_addr=master_addr,
        master_port=master_port,
        source=place.source,
        run_name=run_name,
        start=START.read(environ),
    )


# -- The secret of the run --------------------------------------------------------------------------------------------

_secret: bytes | None = None


def hold_secret(secret: bytes) -> None:
    """Keeps the secret of this run for `take_secret`; for ranks whose launcher sends it over a pipe."""
    global _secret
    _secret = secret


def take_secret(environ: MutableMapping[str, str] = os.environ) -> bytes | None:
    """Returns the secret of this run, and removes it from the environment.

    GRADSYNC_SECRET comes first, then GRADSYNC_SECRET_FILE. What was found here, or handed to
    `hold_secret`, is kept privately, so that later calls give it again.

    Args:
        environ: the variables; GRADSYNC_SECRET is removed from them.

    Returns:
        The secret, or None when there is none.

    Raises:
        InvalidArgument: the variable or the file does not hold a secret, or others can read the file.
    """
    text = environ.pop(SECRET, None)
    secret = SECRET_FILE.read(environ) if text is None else parse_secret(SECRET, text)
    if environ is os.environ:
        if secret is None:
            return _secret
        hold_secret(secret)
    return secret


def read_secret_file(path: str) -> bytes:
    """Reads a secret in hexadecimal from a file that nobody else can have read or planted.

    Args:
        path: the file; a symbolic link is refused, because whoever made it chooses the file.

    Raises:
        InvalidArgument: the file is missing, not a regular file, not this user's own, open to others, or
            holds no secret.
    """
    return parse_secret(f"secret file {path!r}", read_private_file(path))


def read_secret_option(path: str) -> bytes:
    """Reads the secret that `--secret-file` names: a file, or "-" for a line of standard input.

    Raises:
        InvalidArgument: see `read_secret_file`.
    """
    if path != "-":
        return read_secret_file(path)
    line = b""  # no more than the first: what follows is for whoever reads on, a rank
    try:
        while len(line) < _MAX_FILE_BYTES and not line.endswith(b"\n") and (byte := os.read(0, 1)):
            line += byte
    except OSError as error:  # such as one that is closed
        raise InvalidArgument(f"the secret cannot be read from standard input: {error.strerror}") from None
    return parse_secret("standard input", line.decode("ascii", "replace"))


def read_private_file(path: str) -> str:
    """Reads a short text from a file that nobody else can read.

    Args:
        path: the file; a symbolic link is refused.

    Raises:
        InvalidArgument: the file is missing, not a regular file, not this user's own, open to others, or too long.
    """
    import errno  # here, like the next: our launcher's ranks need no file
    import stat

    # O_NONBLOCK: opening a FIFO must not wait for a writer.
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:  # O_NOFOLLOW
            raise InvalidArgument(f"secret file {path!r} is a symbolic link; name the file itself") from None
        raise InvalidArgument(
            f"secret file {path!r} cannot be opened: {error.strerror}; make one with: {HOW_TO_MAKE_A_SECRET_FILE}"
        ) from None
    try:
        # The descriptor is examined, not the path: the path may be exchanged between two looks.
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise InvalidArgument(f"secret file {path!r} needs to be a regular file")
        if status.st_size > _MAX_FILE_BYTES:
            raise InvalidArgument(
                f"secret file {path!r} needs to hold a secret of at most {_MAX_FILE_BYTES} bytes, "
                f"it has {status.st_size}"
            )
        if status.st_uid != os.geteuid():
            raise InvalidArgument(
                f"secret file {path!r} needs to belong to user {os.geteuid()}, it belongs to {status.st_uid}"
            )
        if stat.S_IMODE(status.st_mode) & 0o077:
            raise InvalidArgument(
                f"secret file {path!r} needs mode 0600, got {stat.S_IMODE(status.st_mode):04o}; run: chmod 600 {path}"
            )
        return os.read(descriptor, _MAX_FILE_BYTES).decode("ascii", "replace")
    finally:
        os.close(descriptor)
