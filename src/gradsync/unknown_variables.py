"""GRADSYNC_* variables that gradsync does not know: most are misspelt, and what they were to do is not done.

Said once on each machine, by whoever reads the variables first: our launcher for all its ranks, or the first of the
ranks that another one has started there. A variable that gradsync once had is refused instead, by every process.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from gradsync import environment
from gradsync.errors import InvalidArgument
from gradsync.variable_values import value_of

PREFIX = "GRADSYNC_"
_OF_TESTS = (f"{PREFIX}STAND_IN_", f"{PREFIX}TEST_")  # what this project's own tests set
#: All that it does know.
KNOWN_VARIABLES = {
    v for k, v in vars(environment).items() if k.isupper() and isinstance(v, str) and v.startswith(PREFIX)
}
_NO_TLS = (
    "the rendezvous has no TLS any more: unset it, and keep others from listening with a private network or an SSH "
    "tunnel (docs/security.md)"
)
#: What to do in place of those that it once had.
REMOVED_VARIABLES = {f"{PREFIX}{name}": _NO_TLS for name in ("TLS_CERTIFICATE", "TLS_KEY", "TLS_CA")}
_told: set[str] = set()


def refuse_removed_variables(environ: Mapping[str, str] = os.environ) -> None:
    """Refuses to go on without what a variable once did.

    Raises:
        InvalidArgument: one is set that has gone; the text says what to do in its place.
    """
    for name, advice in REMOVED_VARIABLES.items():
        if value_of(environ, name) is not None:
            raise InvalidArgument(f"{name} is set, but {advice}")


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """Gives the names among those set that begin as gradsync's do, and have never been any."""
    return sorted(
        n
        for n in environ
        if n.startswith(PREFIX) and n not in KNOWN_VARIABLES | REMOVED_VARIABLES.keys() and not n.startswith(_OF_TESTS)
    )


def warn_of_unknown_variables(environ: Mapping[str, str] = os.environ) -> None:
    """Logs each of them, once in this process; in a rank that our launcher has started, that one has."""
    if environment.RANK in environ:
        return
    for name in unknown_variables(environ):
        if name not in _told:
            _told.add(name)
            import logging  # here, because start-up counts

            logging.getLogger("gradsync").warning("gradsync: warning: %s: %s", name, describe_unknown(name))


def describe_unknown(name: str) -> str:
    """Says that there is no such variable, and which was probably meant."""
    meant = nearest_variable(name)
    if meant is None:
        return "no such variable, so it does nothing; docs/environment.md lists all that there are"
    return f"no such variable, so it does nothing: did you mean {meant}?"


def nearest_variable(name: str) -> str | None:
    """Gives the variable that was probably meant: one spelt alike, one that says more or less, one of words alike."""
    import difflib  # here: hardly any process needs it

    own = name.removeprefix(PREFIX)  # which all of them share, and which would make any two look alike
    known = sorted(each.removeprefix(PREFIX) for each in KNOWN_VARIABLES)
    kin = [each for each in known if own and (own in each or each in own)]
    of_like_words = [each for each in known if _has_words_like(own, each)]
    for candidates, cutoff in ((known, 0.8), (kin, 0.0), (of_like_words, 0.0), (known, 0.6)):
        close = difflib.get_close_matches(own, candidates, n=1, cutoff=cutoff)
        if close:
            return PREFIX + close[0]
    return None


def _has_words_like(own: str, known: str) -> bool:
    import difflib

    return all(difflib.get_close_matches(word, known.split("_"), n=1, cutoff=0.75) for word in own.split("_"))
