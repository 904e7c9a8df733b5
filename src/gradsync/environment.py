"""The environment: a table of all GRADSYNC_* variables, this process's rank, and the run's secret.

gradsync's launcher sets some of these variables for its ranks, and `init_process_group` reads them. A process takes its
rank from the first launcher that has set its variables: gradsync's, torchrun, MPI's mpiexec, or Slurm's srun. If the
launcher gives no address for the rendezvous, this module takes a host and a port from the Slurm step, or computes a
name for the run that is the same for all ranks on one machine. This module removes the run's secret from the
environment, and holds the secret in a private variable.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from functools import partial
from typing import Generic, NamedTuple, TypeVar

from gradsync.arguments import LARGEST_PORT, check_address, is_loopback
from gradsync.backends import BACKENDS, unknown_backend
from gradsync.errors import InvalidArgument
from gradsync.machine import read_stat
from gradsync.words import REMOVED, refuse_removed

HOW_TO_MAKE_A_SECRET_FILE = "(umask 077; python3 -c 'import secrets; print(secrets.token_hex(32))' > gradsync.secret)"
_PREFIX = "GRADSYNC_"
_LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_MAX_RECORDER_ENTRIES = 1_000_000
_MIN_SECRET_BYTES = 16
_MAX_FILE_BYTES = 4096
_OF_A_DESCRIPTOR = re.compile(r"fd:\d{1,9}")

T = TypeVar("T")


# -- Parsers: (name of the variable, text) -> value -------------------------------------------------------------------


def value_of(environ: Mapping[str, str], name: str) -> str | None:
    """Returns the text of a variable without white space around it; None if the variable is not set or has no text."""
    return environ.get(name, "").strip() or None


def _text(_name: str, text: str) -> str:
    return text


def _integer(name: str, text: str, lowest: int = 0, highest: int = 10**9, why: str = "") -> int:
    """Returns an integer in a range; `why` is text for the error that explains the upper limit, such as " (N - 1)"."""
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


def _address(name: str, text: str) -> str:
    return check_address(text, name)


def parse_secret(origin: str, text: str) -> bytes:
    """Converts a secret from hexadecimal text to bytes.

    Args:
        origin: the variable or file that contains the secret. The error message names the origin, but never shows the
            secret.
        text: the hexadecimal digits. The function ignores white space before and after the digits.

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
            f"{2 * _MIN_SECRET_BYTES}; "
            f"make one with: {HOW_TO_MAKE_A_SECRET_FILE}"
        ) from None
    return secret


def _secret_of_file(_name: str, path: str) -> bytes:
    return read_secret_file(path)


# -- The table --------------------------------------------------------------------------------------------------------


class Variable(str, Generic[T]):
    """An environment variable of gradsync: a str with the name, and a parser for the value.

    Attributes:
        default: the value if the variable is not set or is empty.
    """

    __slots__ = ("_parse", "default")

    _parse: Callable[[str, str], T]
    default: T

    def __new__(cls, name: str, parse: Callable[[str, str], T], default: T) -> Variable[T]:
        self = super().__new__(cls, name)
        self._parse, self.default = parse, default
        return self

    def read(self, environ: Mapping[str, str] = os.environ) -> T:
        """Returns the value of the variable, or the default if the variable is not set or is empty.

        Raises:
            InvalidArgument: the value is invalid; the error message names the variable.
        """
        text = value_of(environ, self)
        return self.default if text is None else self._parse(self, text)

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)  # pickle stores only the name


# docs/commands.md describes each for users. gradsync's launcher sets the first seven for its ranks.
RANK = Variable("GRADSYNC_RANK", _integer, None)
WORLD_SIZE = Variable("GRADSYNC_WORLD_SIZE", partial(_integer, lowest=1), None)
LOCAL_RANK = Variable("GRADSYNC_LOCAL_RANK", _integer, None)
LOCAL_WORLD_SIZE = Variable("GRADSYNC_LOCAL_WORLD_SIZE", partial(_integer, lowest=1), None)
ADDRESS = Variable("GRADSYNC_ADDRESS", _address, None)  # of the rendezvous server
#: Whether a server of gradsync's launcher or of `gradsync serve` runs at ADDRESS, so that rank 0 starts no server.
HOSTED = Variable("GRADSYNC_HOSTED", _switch, False)
BACKEND = Variable("GRADSYNC_BACKEND", _backend, "auto")
ALLOW_SHARED_GPU = Variable("GRADSYNC_ALLOW_SHARED_GPU", _switch, False)
SECRET = Variable("GRADSYNC_SECRET", parse_secret, None)  # read once, and removed from the environment
SECRET_FILE = Variable("GRADSYNC_SECRET_FILE", _secret_of_file, None)
DEBUG = Variable("GRADSYNC_DEBUG", _switch, False)  # over NCCL the ranks compare everything before it is launched
PLAIN_KERNELS = Variable("GRADSYNC_PLAIN_KERNELS", _switch, False)
#: Overrides the script's value, for example under a debugger.
COLLECTIVE_TIMEOUT_SECONDS = Variable("GRADSYNC_COLLECTIVE_TIMEOUT_SECONDS", _seconds, None)
LOG = Variable("GRADSYNC_LOG", _log_level, None)  # the level of the logger "gradsync"
FLIGHT_RECORDER_ENTRIES = Variable(
    "GRADSYNC_FLIGHT_RECORDER_ENTRIES", partial(_integer, lowest=1, highest=_MAX_RECORDER_ENTRIES), 64
)
TRACE = Variable("GRADSYNC_TRACE", _text, None)  # the folder for Chrome traces

#: All variables, in the order of the documentation.
VARIABLES: tuple[Variable[object], ...] = tuple(v for v in list(globals().values()) if isinstance(v, Variable))
#: The variables that describe one run. A launcher sets these variables for its own ranks, and removes earlier values.
OF_A_RUN = (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, ADDRESS, HOSTED, BACKEND, SECRET, SECRET_FILE)
_warned: set[str] = set()


# -- Invalid, removed and unknown variables ---------------------------------------------------------------------------


def refused_variables(
    environ: Mapping[str, str] = os.environ, variables: Iterable[Variable[object]] = VARIABLES
) -> Iterator[tuple[str, InvalidArgument]]:
    """Yields (name, error) for each variable that is set but no longer supported, or that has an invalid value.

    Args:
        environ: the environment variables.
        variables: the variables whose values the function checks.
    """
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


def unknown_variables(environ: Mapping[str, str] = os.environ) -> dict[str, str | None]:
    """Returns the unknown variables that begin with GRADSYNC_, each with the name that was probably meant, or None."""
    known = {*VARIABLES, *REMOVED["gradsync (variables)"]}
    found = sorted(n for n in environ if n.startswith(_PREFIX) and n not in known)
    return {name: _nearest_variable(name) for name in found}


def describe_unknown(meant: str | None) -> str:
    """Returns the warning about an unknown variable; `meant` is the name that the user probably meant, or None."""
    if meant is None:
        return "gradsync has no such variable and ignores it; docs/commands.md lists all variables"
    return f"gradsync has no such variable and ignores it; did you mean {meant}?"


def check_removed_variables(environ: Mapping[str, str] = os.environ) -> None:
    """Checks that no variable is set that gradsync no longer supports.

    Raises:
        InvalidArgument: such a variable is set; the error message says what to do instead.
    """
    for _, error in refused_variables(environ, ()):
        raise error


def check_variables(environ: Mapping[str, str] = os.environ) -> None:
    """Checks, in the launcher, the variables that its ranks inherit, and warns of unknown variables.

    If the launcher did not check the variables, each rank would report the same error.

    Raises:
        InvalidArgument: a variable that ranks inherit has an invalid value, or a variable is set that gradsync no
            longer supports.
    """
    for _, error in refused_variables(environ, [variable for variable in VARIABLES if variable not in OF_A_RUN]):
        raise error
    warn_of_unknown_variables(environ)


def warn_of_unknown_variables(environ: Mapping[str, str] = os.environ) -> None:
    """Logs each unknown variable once in a process.

    In a rank of gradsync's launcher, the function logs nothing, because the launcher has logged the unknown variables.
    """
    if RANK in environ:
        return
    for name, meant in unknown_variables(environ).items():
        if name not in _warned:
            _warned.add(name)
            _warn(f"warning: {name}: {describe_unknown(meant)}")


def _warn(text: str) -> None:
    import logging  # imported here, so that ranks start fast

    logging.getLogger("gradsync").warning("gradsync: %s", text)


def _nearest_variable(name: str) -> str | None:
    """Returns the known variable that is most similar to an unknown name; None if no known variable is similar."""
    from difflib import get_close_matches  # imported here: hardly any process needs it

    def has_words_like(known: str) -> bool:
        return all(get_close_matches(word, known.split("_"), n=1, cutoff=0.75) for word in own.split("_"))

    own = name.removeprefix(_PREFIX)  # without the prefix, which would make any two names similar
    known = sorted(each.removeprefix(_PREFIX) for each in VARIABLES)
    kin = [each for each in known if own and (own in each or each in own)]
    for candidates, cutoff in ((known, 0.8), (kin, 0.0), (list(filter(has_words_like, known)), 0.0), (known, 0.6)):
        close = get_close_matches(own, candidates, n=1, cutoff=cutoff)
        if close:
            return _PREFIX + close[0]
    return None


def configure_logging(environ: Mapping[str, str] = os.environ) -> None:
    """Sets the `gradsync` logger to the level in GRADSYNC_LOG, if this variable is set.

    If the logger has no handler, the function adds a handler that writes to standard error.

    Raises:
        InvalidArgument: GRADSYNC_LOG is not a level.
    """
    level = LOG.read(environ)
    if level is None:
        return
    import logging  # imported here, so that ranks start fast

    logger = logging.getLogger("gradsync")
    logger.setLevel(level)
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s: %(message)s"))
        logger.addHandler(handler)


# -- The variables of launchers ---------------------------------------------------------------------------------------

SLURM = "Slurm"


class _Launcher(NamedTuple):
    """The environment variables by which one launcher gives a process its rank.

    Attributes:
        name: the launcher's name in messages.
        rank, world_size, local_rank, local_world_size: the names of the environment variables that hold these values.
        companions: the names of the launcher's other variables. A user who unsets the variables of the rank must unset
            the companions too.
    """

    name: str
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str
    companions: tuple[str, ...] = ()

    def set_in(self, environ: Mapping[str, str]) -> list[str]:
        """Returns the names of this launcher's variables that are set."""
        names = (self.rank, self.world_size, self.local_rank, self.local_world_size, *self.companions)
        return [name for name in names if value_of(environ, name) is not None]


_OURS = _Launcher("gradsync", RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, (ADDRESS, HOSTED))
_TORCHRUN = _Launcher("RANK", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", ("MASTER_ADDR", "MASTER_PORT"))
# PMI_RANK is listed twice, because Cray's launcher names the variable of the local rank differently from MPICH's and
# Intel's.
_MPI_LAUNCHERS = (
    _Launcher(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        ("PMIX_NAMESPACE",),
    ),
    _Launcher("PMI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", ("PMI_FD",)),
    _Launcher("PMI", "PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
)
#: The values of `RankEnvironment.source` for ranks that may use MPI. "MPI" means that a query to MPI gave the rank.
SOURCES_WITH_MPI = (*dict.fromkeys(launcher.name for launcher in _MPI_LAUNCHERS), SLURM, "MPI")
_PREFIXES_OF_MPI = ("OMPI_COMM_WORLD_", "PMIX_", "PMI_", "MPI_LOCAL", "HYDI_")
_HINTS_OF_MPI = ("OMPI_", "PMI", "MPI_LOCAL", "HYDI_", "MV2_COMM_WORLD_")
# Slurm's variables, with their values for a single task. In a container, perhaps SLURM_PROCID alone is set.
_SLURM_ALONE = (("SLURM_NTASKS", "1"), ("SLURM_NPROCS", "1"), ("SLURM_STEP_NUM_TASKS", "1"), ("SLURM_PROCID", "0"))

# Other variables that torchrun and gradsync's launcher set for a rank.
_BESIDE_TORCHRUN = {"GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE"}


def variables_of_mpi(environ: Mapping[str, str]) -> set[str]:
    """Returns the names of the variables that mpiexec sets for a rank.

    If mpiexec has started gradsync's launcher, the launcher removes these variables from the environment of its own
    ranks, because they describe the launcher, not the ranks.
    """
    return {name for name in environ if name.startswith(_PREFIXES_OF_MPI)}


def find_mpiexec(environ: Mapping[str, str] = os.environ) -> str | None:
    """Returns the path of mpiexec; None if there is no mpiexec.

    The mpiexec in the folder of this Python takes precedence over the mpiexec in PATH, because pip installs MPI there.
    """
    import shutil  # imported here, because the import takes a millisecond

    beside = os.path.join(os.path.dirname(sys.executable), "mpiexec")
    return beside if os.access(beside, os.X_OK) else shutil.which("mpiexec", path=environ.get("PATH"))


def without_launcher(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns a copy of the environment variables, without the variables that launchers set for a rank."""
    inherited = {*OF_A_RUN, *_TORCHRUN.set_in(environ), *variables_of_mpi(environ), *_BESIDE_TORCHRUN}
    prefixes = ("TORCHELASTIC_", "SLURM_")
    return {name: value for name, value in environ.items() if name not in inherited and not name.startswith(prefixes)}


# -- This process's rank ----------------------------------------------------------------------------------------------


class RankEnvironment(NamedTuple):
    """This process's rank, and the other values that its launcher has set.

    Attributes:
        rank: the rank of this process, from 0 to world_size - 1.
        world_size: the number of ranks in the run.
        local_rank: the rank of this process on its machine; equal to `rank` if no launcher gives a local rank.
        local_world_size: the number of ranks on this machine; equal to `world_size` if no launcher gives this number.
        address: the address of the rendezvous server, as host:port, or None.
        secret: the secret of the run, or None. repr() never shows it.
        hosted: whether a server of gradsync's launcher or of `gradsync serve` runs at `address`.
        master_addr: the value of MASTER_ADDR; the loopback address instead, if the launcher says that all ranks are on
            this machine. If neither MASTER_ADDR nor GRADSYNC_ADDRESS is set: in a Slurm step on several hosts, the
            step's first host. Otherwise None.
        master_port: the value of MASTER_PORT. If neither MASTER_PORT nor GRADSYNC_ADDRESS is set: in a Slurm step on
            several hosts, a port that is computed from the name of the step. Otherwise None. The rendezvous server does
            not use this port, but the port next to it.
        source: the origin of the rank. "gradsync", "RANK" (set by torchrun or by hand), "Open MPI", "PMI" and "Slurm"
            mean environment variables. "MPI" means a query to MPI. "arguments" means the arguments of
            init_process_group(), or a process without a launcher.
        run_name: a name of this run, by which the ranks of one machine find each other without an address. A run can
            have a name only if mpiexec or srun has started several ranks, all of them on this machine, and no variables
            give an address (GRADSYNC_ADDRESS, or both MASTER_ADDR and MASTER_PORT). Otherwise None.
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

    def __repr__(self) -> str:
        shown = (f"{name}={value!r}" for name, value in self._asdict().items() if name != "secret")
        return f"RankEnvironment({', '.join(shown)})"


#: The rank environment of a world of one rank.
ALONE = RankEnvironment(0, 1, 0, 1, source="arguments")


class _Place(NamedTuple):
    """A process's rank as one launcher gives it; see the attributes of RankEnvironment. None means unknown."""

    source: str
    rank: int
    world_size: int
    local_rank: int | None = None
    local_world_size: int | None = None


class WorldSettings(NamedTuple):
    """The arguments of init_process_group(), completed from the environment.

    Attributes:
        place: this process's rank, and the other values that its launcher has set.
        address, device, timeout_seconds, collective_timeout_seconds, allow_shared_gpu: the arguments of
            init_process_group with these names.
    """

    place: RankEnvironment
    address: str | None
    device: str | None
    timeout_seconds: float
    collective_timeout_seconds: float
    allow_shared_gpu: bool


def read_environment(environ: MutableMapping[str, str] = os.environ) -> RankEnvironment | None:
    """Reads this process's rank from the variables of the first launcher in the table below that has set its variables.

    | precedence | launcher | variables |
    | --- | --- | --- |
    | 1 | gradsync | `GRADSYNC_RANK`, `_WORLD_SIZE`, `_LOCAL_RANK`, `_LOCAL_WORLD_SIZE` |
    | 2 | torchrun, or by hand | `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE` |
    | 3 | mpiexec of Open MPI | `OMPI_COMM_WORLD_RANK`, `_SIZE`, `_LOCAL_RANK`, `_LOCAL_SIZE` |
    | 4 | mpiexec of MPICH or Intel MPI (PMI) | `PMI_RANK`, `PMI_SIZE`, `MPI_LOCALRANKID`, `MPI_LOCALNRANKS` |
    | 4 | Cray's launcher (PMI) | `PMI_RANK`, `PMI_SIZE`, `PMI_LOCAL_RANK`, `PMI_LOCAL_SIZE` |
    | 5 | srun (Slurm) | `SLURM_PROCID`, `SLURM_STEP_NUM_TASKS` or `SLURM_NTASKS`, `SLURM_LOCALID` |

    If several launchers have set their variables, all must give the same rank and world size. If the values differ, one
    launcher has inherited the variables of another launcher, and gradsync cannot know which values are right. There are
    two exceptions. All processes of a Slurm step inherit Slurm's variables, so gradsync uses Slurm's rank only if no
    other launcher gives a rank, and Slurm's local rank only if no other launcher gives a local rank. If mpiexec has
    started torchrun's agents, one on each machine, gradsync uses torchrun's variables.

    Under every launcher, the function also reads MASTER_ADDR, MASTER_PORT, GRADSYNC_ADDRESS, GRADSYNC_HOSTED
    and the secret, and removes GRADSYNC_SECRET from `environ`.

    Args:
        environ: the environment variables.

    Returns:
        The rank environment of this process, or None if no launcher has set its variables.

    Raises:
        InvalidArgument: a variable is malformed or out of range; a launcher's variable of the rank is set without the
            variable of the world size, or the reverse; two launchers give this process different ranks; or the secret
            cannot be read (see take_secret). The error message names the variable or the file of the secret.
    """
    place = _find_place(environ)
    return None if place is None else _complete(environ, place)


def is_launched() -> bool:
    """Returns whether the environment has a rank for this process, from gradsync's launcher, torchrun, mpiexec or srun.

    RANK and WORLD_SIZE count too if the user has set them by hand. A script that also runs without a launcher can pass
    the backend `"auto" if gs.is_launched() else "local"`. Then gradsync does not warn that no launcher was found.

    Raises:
        InvalidArgument: a variable is malformed, the variables of launchers contradict each other, or the secret of the
            run cannot be read.
    """
    return read_environment() is not None


def alone_without_launcher(environ: Mapping[str, str] = os.environ) -> RankEnvironment:
    """Returns the rank environment of a process without a launcher, and logs that it is a world of one rank.

    Raises:
        InvalidArgument: a variable suggests that a launcher has started this process; the error message names the
            variable.
    """
    hints: list[str] = [name for name in OF_A_RUN if name != BACKEND and value_of(environ, name) is not None]
    hints += _TORCHRUN.set_in(environ) + [name for name in sorted(environ) if name.startswith(_HINTS_OF_MPI)]
    hints += [name for name, alone in _SLURM_ALONE if value_of(environ, name) not in (None, alone)]
    if hints:
        raise no_rank_is_known(f"{hints[0]} is set, which suggests a launcher, but RANK and WORLD_SIZE are not set")
    unknown = unknown_variables(environ)
    _warned.update(unknown)
    _warn(
        "no launcher has started this process, so it is a world of one rank (for two: gradsync run -n 2 script.py)"
        + "".join(f"; {name}: {describe_unknown(meant)}" for name, meant in unknown.items())
    )
    return ALONE


def no_rank_is_known(reason: str) -> InvalidArgument:
    """Returns the error for a process that should be one of several ranks, but does not know its rank."""
    return InvalidArgument(
        f"no rank is known: {reason}. Start the script with `gradsync run -n 2 script.py` or `mpiexec -n 2 python "
        'script.py`, pass rank= and world_size=, or, for one process, use GRADSYNC_BACKEND=local or backend="local"'
    )


def environment_of_arguments(rank: int, world_size: int) -> RankEnvironment:
    """Returns the rank environment for a rank that the program has given; only the other values come from variables.

    Raises:
        InvalidArgument: a variable is malformed; the error message names the variable.
    """
    return _complete(os.environ, _Place("arguments", rank, world_size))


def _complete(environ: MutableMapping[str, str], place: _Place) -> RankEnvironment:
    """Adds the addresses, the secret and the other values of the rank environment to a process's rank."""
    address = ADDRESS.read(environ)
    master_addr, master_port, run_name = value_of(environ, "MASTER_ADDR"), read_master_port(environ), None
    if place.world_size > 1 and not address:
        is_here = place.local_world_size == place.world_size  # then MASTER_ADDR does not matter
        master_addr = master_addr if is_here else _read_host(environ)
        if is_here or (master_addr is not None and is_loopback(master_addr)):
            run_name = _name_run(environ, place.source, master_port)
        elif place.source == SLURM:
            master_addr, master_port = master_addr or _first_host(environ), master_port or _step_port(environ)
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
    )


def _read_host(environ: Mapping[str, str]) -> str | None:
    """Returns the host in MASTER_ADDR, an IPv6 address also in brackets; None if this variable is not set.

    Raises:
        InvalidArgument: the variable has a port, too, or is a URL.
    """
    host = value_of(environ, "MASTER_ADDR")
    if host is None:
        return None
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if "/" in bare or bare.count(":") == 1:
        raise InvalidArgument(
            f"MASTER_ADDR needs to be the name or the address of a host, without a port, got {host!r}"
        )
    return bare


def _find_place(environ: Mapping[str, str]) -> _Place | None:
    """Returns this process's rank from the first launcher that has set its variables, see `read_environment`.

    If this launcher gives no local rank, the local rank comes from the next launcher that gives a local rank.
    """
    launchers = [
        launcher
        for launcher in (_OURS, _TORCHRUN, *_MPI_LAUNCHERS)
        if value_of(environ, launcher.rank) is not None or value_of(environ, launcher.world_size) is not None
    ]
    if not launchers:
        return _slurm_place(environ)
    first = _read_place(environ, launchers[0])
    for launcher in launchers[1:]:
        other = _read_place(environ, launcher)
        if (other.rank, other.world_size) == (first.rank, first.world_size):
            if first.local_rank is None and other.local_world_size is not None:
                first = other._replace(source=first.source)
        elif not _started_agents(environ, launcher, other):
            raise _contradiction(environ, launchers[0], launcher)
    if first.local_rank is None:
        with contextlib.suppress(InvalidArgument):  # Slurm may describe the daemons of the other launcher
            slurm = _slurm_place(environ)
            if slurm is not None and (slurm.rank, slurm.world_size) == (first.rank, first.world_size):
                return slurm._replace(source=first.source)
    return first


def _read_place(environ: Mapping[str, str], launcher: _Launcher) -> _Place:
    rank, world_size = _read_pair(environ, launcher.rank, launcher.world_size)
    if value_of(environ, launcher.local_rank) is None:
        return _Place(launcher.name, rank, world_size)
    size = _read(environ, launcher.local_world_size, 1, world_size, f" ({launcher.world_size})")
    why = "" if size is None else f" ({launcher.local_world_size} - 1)"
    return _Place(
        launcher.name, rank, world_size, _read(environ, launcher.local_rank, 0, (size or world_size) - 1, why), size
    )


def _read_pair(environ: Mapping[str, str], rank_name: str, size_name: str) -> tuple[int, int]:
    """Returns a rank and its world size, from two variables."""
    rank, size = value_of(environ, rank_name), value_of(environ, size_name)
    if rank is None or size is None:
        known, missing = (size_name, rank_name) if rank is None else (rank_name, size_name)
        raise InvalidArgument(f"{known}={environ[known]!r} is set, but {missing} is not; set both or neither")
    world_size = _integer(size_name, size, 1)
    return _integer(rank_name, rank, 0, world_size - 1, f" ({size_name} - 1)"), world_size


def _read(environ: Mapping[str, str], name: str, lowest: int, highest: int = 10**9, why: str = "") -> int | None:
    """Returns the integer in a variable; None if the variable is not set."""
    text = value_of(environ, name)
    return None if text is None else _integer(name, text, lowest, highest, why)


def read_master_port(environ: Mapping[str, str]) -> int | None:
    """Returns the port in MASTER_PORT, or None if this variable is not set.

    Raises:
        InvalidArgument: the variable is not a port number.
    """
    return _read(environ, "MASTER_PORT", 1, LARGEST_PORT)


def _started_agents(environ: Mapping[str, str], launcher: _Launcher, place: _Place) -> bool:
    """Returns whether a launcher started torchrun's agents, one on each machine, and torchrun started the ranks."""
    return (
        launcher is not _TORCHRUN
        and value_of(environ, "TORCHELASTIC_RUN_ID") is not None
        and _read(environ, "GROUP_WORLD_SIZE", 1) == place.world_size
    )


def _contradiction(environ: Mapping[str, str], first: _Launcher, second: _Launcher) -> InvalidArgument:
    values, unset = [], []
    for launcher in (first, second):
        values.append(" ".join(f"{name}={environ[name].strip()}" for name in (launcher.rank, launcher.world_size)))
        unset.append(" ".join(launcher.set_in(environ)))
    return InvalidArgument(
        f"{values[0]} and {values[1]} name different ranks for this process: one launcher has inherited the variables "
        f"of another launcher. Before you start the ranks, unset the variables of the wrong launcher: either\n"
        f"  unset {unset[0]}\nor\n  unset {unset[1]}"
    )


# -- Slurm ------------------------------------------------------------------------------------------------------------

# Steps that `srun` did not make, such as batch scripts and shells of salloc, have this number or a larger number.
_FIRST_SPECIAL_STEP = 0xFFFF_FFF0
_TASKS_OF_NODES = r"([1-9]\d{0,6})(?:\(x([1-9]\d{0,6})\))?"  # such as 4(x2): 4 tasks on each of 2 nodes
# These ports are below the ports that Linux uses for outgoing connections, by default 32768 and higher.
_FIRST_PORT = 15_000
_PORTS = 15_000


def _slurm_place(environ: Mapping[str, str]) -> _Place | None:
    """Returns the rank of a process that srun has started; None in a batch script, although SLURM_PROCID is 0 there."""
    step = _step_of(environ)
    is_special = step is not None and step.isdecimal() and int(step) >= _FIRST_SPECIAL_STEP
    if value_of(environ, "SLURM_PROCID") is None or step is None or is_special:
        return None
    # SLURM_NTASKS may describe the whole allocation, even if the step is smaller.
    tasks = "SLURM_NTASKS" if value_of(environ, "SLURM_STEP_NUM_TASKS") is None else "SLURM_STEP_NUM_TASKS"
    rank, world_size = _read_pair(environ, "SLURM_PROCID", tasks)
    if value_of(environ, "SLURM_LOCALID") is None:
        return _Place(SLURM, rank, world_size)
    local_world_size = _tasks_here(environ)
    local_rank = _read(environ, "SLURM_LOCALID", 0, (local_world_size or world_size) - 1)
    return _Place(SLURM, rank, world_size, local_rank, local_world_size)


def _tasks_here(environ: Mapping[str, str]) -> int | None:
    """Returns the number of tasks on this node; None if SLURM_STEP_TASKS_PER_NODE, such as "4(x2),1", is not set."""
    name = "SLURM_STEP_TASKS_PER_NODE"
    text = value_of(environ, name)
    if text is None:
        return None
    node = _read(environ, "SLURM_NODEID", 0) or 0
    for entry in text.split(","):
        tasks = re.fullmatch(_TASKS_OF_NODES, entry)
        if tasks is None:
            raise InvalidArgument(f"{name} needs to be a list such as 4(x2),1, got {text!r}")
        node -= int(tasks[2] or 1)
        if node < 0:
            return int(tasks[1])
    raise InvalidArgument(f"SLURM_NODEID={environ['SLURM_NODEID']} has no entry in {name}={text!r}")


def _first_host(environ: Mapping[str, str]) -> str | None:
    """Returns the first host of the Slurm step, on which Slurm starts rank 0 by default; None without a list of hosts.

    The list has the syntax that `scontrol show hostnames` reads, such as "rack[1-2]node[03-04,7],login".
    """
    hosts = value_of(environ, "SLURM_STEP_NODELIST") or value_of(environ, "SLURM_JOB_NODELIST") or ""
    first = re.match(r"(?:[^,\[\]]|\[[^\[\]]*\])+", hosts)
    return None if first is None else re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0])


def _step_port(environ: Mapping[str, str]) -> int:
    """Returns a port that is the same for all tasks of a Slurm step, and most likely differs between steps."""
    import zlib  # imported here: only steps on several machines need it

    return _FIRST_PORT + zlib.crc32(_step_name(environ).encode()) % _PORTS


def _step_name(environ: Mapping[str, str]) -> str:
    """Returns a name that is unique among the Slurm steps on its hosts. A requeued job gets a new name."""
    job = value_of(environ, "SLURM_JOB_ID") or value_of(environ, "SLURM_JOBID") or ""
    again = value_of(environ, "SLURM_RESTART_COUNT") or "0"
    return f"slurm-{job}.{_step_of(environ)}.{again}"


def _step_of(environ: Mapping[str, str]) -> str | None:
    return value_of(environ, "SLURM_STEP_ID") or value_of(environ, "SLURM_STEPID")


# -- A name for a run on one machine ----------------------------------------------------------------------------------


def _name_run(environ: Mapping[str, str], source: str, master_port: int | None) -> str | None:
    """Returns a name for this run: the same for all its ranks on this machine, and different for other runs.

    For a Slurm step, the name contains the numbers of the job and the step. Not every MPI launcher sets a variable that
    identifies the run. But all ranks on a machine descend from one process, MPI's launcher or its daemon. So for MPI,
    the name contains the pid and the start time of the launcher or daemon.

    The name can be part of a file name. The function returns None if neither srun nor mpiexec started the ranks, or if
    this process cannot see the launcher, for example because each rank runs in its own container.
    """
    if source != SLURM and master_port is not None:
        return f"port-{master_port}.{value_of(environ, 'TORCHELASTIC_RESTART_COUNT') or 0}"
    if source == SLURM:
        return "".join(letter if letter.isalnum() or letter in "-." else "_" for letter in _step_name(environ))
    names = [name for launcher in _MPI_LAUNCHERS if launcher.name == source for name in launcher.set_in(environ)]
    if not names:
        return None
    found = _launcher_process({f"{name}={environ[name]}".encode() for name in names})
    return None if found is None else f"{source.replace(' ', '')}-{found[0]}-{found[1]}"


def _launcher_process(own: set[bytes]) -> tuple[int, str] | None:
    """Returns pid and start time of the closest ancestor that does not belong to this rank; None if there is none.

    All processes that belong to the rank, such as a shell that started this process, have the variables `own`.
    """
    process = read_stat(os.getpid())
    while process is not None and process.parent > 0:
        pid = process.parent
        process = read_stat(pid)
        if not own <= _variables_of(pid):
            return pid, "0" if process is None else process.start_time
    return None


def _variables_of(pid: int) -> set[bytes]:
    """Returns the variables with which a process was started, as NAME=value; empty if they cannot be read."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return set(file.read().split(b"\0"))
    except OSError:
        return set()


# -- The secret of the run --------------------------------------------------------------------------------------------

_secret: bytes | None = None


def hold_secret(secret: bytes) -> None:
    """Stores the secret of this run for `take_secret`, in ranks whose launcher sends the secret over a pipe."""
    global _secret
    _secret = secret


def take_secret(environ: MutableMapping[str, str] = os.environ) -> bytes | None:
    """Returns the secret of this run, and removes the variable GRADSYNC_SECRET from the environment.

    GRADSYNC_SECRET takes precedence over GRADSYNC_SECRET_FILE. If `environ` is os.environ, the function stores the
    secret with `hold_secret`, so that later calls return the same secret.

    Args:
        environ: the environment variables, from which the function removes GRADSYNC_SECRET.

    Returns:
        The secret, or None if the run has no secret.

    Raises:
        InvalidArgument: the variable contains no secret, or the file is wrong (see read_secret_file).
    """
    text = environ.pop(SECRET, None)
    secret = SECRET_FILE.read(environ) if text is None else parse_secret(SECRET, text)
    if environ is os.environ:
        if secret is None:
            return _secret
        hold_secret(secret)
    return secret


def read_secret_file(path: str) -> bytes:
    """Reads a hexadecimal secret from a file that other users can neither read nor write.

    Args:
        path: the path of the file. A symbolic link is an error, because another user may have made it. "fd:5" is the
            descriptor that a rank has inherited from gradsync's launcher.

    Raises:
        InvalidArgument: the file contains no secret, or cannot be read safely (see read_private_file).
    """
    text = _read_inherited(int(path[3:])) if _OF_A_DESCRIPTOR.fullmatch(path) else read_private_file(path)
    return parse_secret(f"secret file {path!r}", text)


def _read_inherited(descriptor: int) -> str:
    """Reads the secret from the file in memory that gradsync's launcher has passed to its ranks as a descriptor.

    Raises:
        InvalidArgument: this process has not inherited the descriptor, so it is no rank.
    """
    try:
        is_ours = os.readlink(f"/proc/self/fd/{descriptor}").startswith("/memfd:gradsync-secret")
        if is_ours and os.fstat(descriptor).st_uid == os.geteuid():
            return os.pread(descriptor, _MAX_FILE_BYTES, 0).decode("ascii", "replace")
    except OSError:
        pass
    raise InvalidArgument(
        f"{SECRET_FILE}=fd:{descriptor} is for the ranks of one launcher, and this process is no rank: it is a program "
        "that a rank has started. Only a rank, or a program that takes a rank's place (exec), can join its run"
    )


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
        path: the path of the file. A symbolic link is an error.

    Raises:
        InvalidArgument: the file cannot be opened, is not a regular file, is not owned by this user, is accessible to
            other users, or is too long.
    """
    import errno  # imported here, like stat: ranks of gradsync's launcher read no file
    import stat

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
        # Checks the open file, not its path, because a different file may meanwhile have this path.
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise InvalidArgument(f"secret file {path!r} needs to be a regular file")
        if status.st_size > _MAX_FILE_BYTES:
            raise InvalidArgument(
                f"secret file {path!r} needs to contain a secret of at most {_MAX_FILE_BYTES} bytes, "
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
