"""GRADSYNC_* variables that gradsync does not know: most are misspelt, and what they were to do is not done.

Said once on each machine, by whoever reads the variables first: our launcher for all its ranks, or the first of the
ranks that another one has started there.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from gradsync import environment

PREFIX = "GRADSYNC_"
_OF_TESTS = (f"{PREFIX}STAND_IN_", f"{PREFIX}TEST_")  # what this project's own tests set
#: All that it does know.
KNOWN_VARIABLES = {
    v for k, v in vars(environment).items() if k.isupper() and isinstance(v, str) and v.startswith(PREFIX)
}
_told: set[str] = set()


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """Gives the names among those set that begin as gradsync's do, and are none of them."""
    return sorted(
        n for n in environ if n.startswith(PREFIX) and n not in KNOWN_VARIABLES and not n.startswith(_OF_TESTS)
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
