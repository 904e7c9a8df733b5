"""What is set for gradsync in the environment: names that it does not know, and values that it refuses."""

from __future__ import annotations

from collections.abc import Callable

from gradsync import environment, settings
from gradsync.doctor.finding import Finding, broken, ok, warning
from gradsync.doctor.surroundings import Surroundings
from gradsync.errors import InvalidArgument
from gradsync.unknown_variables import (
    PREFIX,
    REMOVED_VARIABLES,
    describe_unknown,
    nearest_variable,
    refuse_removed_variables,
    unknown_variables,
)


def check_variables(here: Surroundings) -> list[Finding]:
    """The GRADSYNC_* variables; a line for each that is wrong."""
    present = sorted(name for name in here.environ if name.startswith(PREFIX))
    unknown = [_unknown(name) for name in unknown_variables(here.environ)]
    refused = [broken(name, reason, f"unset {name}") for name, reason in _refusals(here).items()]
    if unknown or refused:
        return [*refused, *unknown]
    shown = ", ".join(_shown(here, name) for name in present)
    return [ok("GRADSYNC_*", shown or "none is set")]


def _unknown(name: str) -> Finding:
    meant = nearest_variable(name)
    advice = f"unset {name}" if meant is None else f'export {meant}="${name}"; unset {name}'
    return warning(name, describe_unknown(name), advice)


def _refusals(here: Surroundings) -> dict[str, str]:
    """Returns what gradsync would say of each value that it refuses."""
    environ = dict(here.environ)
    questions: dict[str, Callable[[], object]] = {
        environment.FLIGHT_RECORDER_ENTRIES: lambda: settings.flight_recorder_entries(environ),
        environment.COLLECTIVE_TIMEOUT_SECONDS: lambda: settings.collective_timeout_seconds(1.0, environ),
        environment.ALLOW_SHARED_GPU: lambda: settings.allows_shared_gpu(environ),
        environment.DEBUG: lambda: settings.asks_for_debug_mode(environ),
        environment.LOG: lambda: settings.log_level(environ),
        environment.BACKEND: lambda: _check_backend(environ[environment.BACKEND]),
        environment.ADDRESS: lambda: environment.check_address(environ[environment.ADDRESS], environment.ADDRESS),
        environment.SECRET_FILE: lambda: environment.take_secret(
            {environment.SECRET_FILE: environ[environment.SECRET_FILE]}
        ),
        environment.SECRET: lambda: environment.take_secret({environment.SECRET: environ[environment.SECRET]}),
    }
    for name in REMOVED_VARIABLES:
        questions[name] = lambda name=name: refuse_removed_variables({name: environ[name]})  # type: ignore[misc]
    found = {}
    for name, ask in questions.items():
        if environ.get(name, "").strip():
            try:
                ask()
            except InvalidArgument as error:
                found[name] = str(error)
    return found


def _check_backend(value: str) -> None:
    if value.strip() not in environment.BACKENDS:
        raise InvalidArgument(f"{value!r} is no backend: use one of {', '.join(environment.BACKENDS)}")


def _shown(here: Surroundings, name: str) -> str:
    return name if name == environment.SECRET else f"{name}={here.environ[name]}"


def _origin(source: str) -> str:
    return {"RANK": "that torchrun or you have", "gradsync": "that gradsync run has"}.get(source, f"that {source} has")


def check_launcher(here: Surroundings) -> list[Finding]:
    """Whether this shell has inherited some rank's place, which every script started here would take for its own."""
    try:
        place = environment.read_environment(dict(here.environ))
    except InvalidArgument as error:
        return [broken("launcher", str(error).replace("\n", " "), "unset what is not of this run")]
    if place is None:
        return [ok("launcher", "no rank's variables are set here")]
    text = f"this shell is rank {place.rank} of {place.world_size}, by variables {_origin(place.source)} set"
    names = [name for name in ("RANK", "WORLD_SIZE", environment.RANK, environment.WORLD_SIZE) if name in here.environ]
    advice = f"inside a job that is right; else: unset {' '.join(names)}" if names else "inside a job that is right"
    return [warning("launcher", text, advice)]
