"""What is set for gradsync in the environment: names that it does not know, and values that it refuses."""

from __future__ import annotations

from gradsync import environment
from gradsync.doctor.finding import Finding, broken, ok, warning
from gradsync.doctor.surroundings import Surroundings
from gradsync.errors import InvalidArgument


def check_variables(here: Surroundings) -> list[Finding]:
    """The GRADSYNC_* variables; a line for each that is wrong."""
    refused = [broken(name, str(error), f"unset {name}") for name, error in environment.refused_variables(here.environ)]
    unknown = [_unknown(name, meant) for name, meant in environment.unknown_variables(here.environ).items()]
    if unknown or refused:
        return [*refused, *unknown]
    present = sorted(name for name in here.environ if name.startswith("GRADSYNC_"))
    shown = ", ".join(name if name == environment.SECRET else f"{name}={here.environ[name]}" for name in present)
    return [ok("GRADSYNC_*", shown or "none is set")]


def _unknown(name: str, meant: str | None) -> Finding:
    advice = f"unset {name}" if meant is None else f'export {meant}="${name}"; unset {name}'
    return warning(name, environment.describe_unknown(meant), advice)


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
