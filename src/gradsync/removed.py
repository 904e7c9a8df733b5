"""The words of gradsync 0.2 that 0.3 does not have, each with what to write instead. This file goes in 0.4.

A user who types such a word gets an error with the advice of this table.
"""

from __future__ import annotations

from typing import NoReturn

from gradsync.errors import InvalidArgument

_HOOK = "register_hook() takes a function of the bucket; examples/hooks.py has float16, bfloat16, int8 and PowerSGD"
_FEW_LINES = "examples/torch_loop.py and examples/jax_loop.py average gradients in a few lines of your own"
_ADD_UP = "add gradients up in arrays of your own, and hand over each sum once"
_UNEVEN = "with sync.backward(weight=len(batch)): a rank without a batch passes 0 (docs/uneven.md)"
_SIZES = "pass the number of rows of each rank; comm.all_gather(np.array([len(array)])) gives this list"
_REPORT = "the launcher's report shows where each rank is, and print(comm.recorder) the last collectives"
_BENCH = "examples/threshold.py finds a threshold; in a clone of gradsync, `pytest benchmarks/` measures all else"
_TRACE = "gradsync run --trace DIR writes a Chrome trace that https://ui.perfetto.dev opens"

#: Where a user types the word -> the word -> what to write instead.
REMOVED: dict[str, dict[str, str]] = {
    "AllreduceCallback": {
        "compression": f"on one machine it made steps slower; {_HOOK}",
        "prescale": "multiply the gradient before you hand it over",
        "postscale": "multiply the result",
        "first_bucket_bytes": "leave it out: no measurement showed a gain",
        "lock_gradients": "leave it out",
    },
    "an AllreduceCallback": {
        "accumulate": _ADD_UP,
        "no_sync": _ADD_UP,
        "discard": "leave it out: hand over nothing that you do not want to reduce",
        "join": _UNEVEN,
        "filled": "sync.results() has all results of the step, also those of gradients that this rank lacked",
        "dump_shapes": "two lines of Python write the shapes: examples/threshold.py shows them",
    },
    "init_process_group": {"debug": "set GRADSYNC_DEBUG=1, or start with `gradsync run --debug`"},
    "all_gather": {"sizes='ask'": _SIZES},
    "gather": {"sizes='ask'": _SIZES},
    "gradsync": {
        "hooks": _HOOK,
        "adapters": _FEW_LINES,
        "Synchronised": _FEW_LINES,
        "trace": _TRACE,
        "dump_flight_recorder": _REPORT,
        "GradientChanged": "leave it out: nothing raises this error",
    },
    "gradsync (command)": {"bench": _BENCH, "trace": _TRACE},
    "gradsync run": {
        "--state-dir": "choose a directory yourself, and pass it to your script",
        "--join-timeout": "init_process_group(timeout_seconds=...) limits the wait for other machines",
        "--node-address": "leave it out: only the address of node 0 matters, and that is in --rendezvous",
        "--dump-dir": _REPORT,
    },
    "gradsync (variables)": {
        "GRADSYNC_STATE_DIR": "choose a directory yourself, and pass it to your script",
        "GRADSYNC_DUMP_DIR": _REPORT,
        "GRADSYNC_START": "unset it",
    },
}


class RemovedName(InvalidArgument, AttributeError):
    """A name that gradsync had until 0.2. As an AttributeError, it lets `hasattr` answer False."""


class RemovedModule(InvalidArgument, ImportError):
    """A module that gradsync had until 0.2. As an ImportError, it is skipped by tools that import all modules."""


def _error_for(where: str, word: str) -> str | None:
    """Returns the text of the error for a word that has gone; None if 0.2 had no such word there."""
    advice = REMOVED[where].get(word)
    return advice and f"{where.partition(' (')[0]} has no {word} any more (removed in 0.3): {advice}"


def refuse_removed(where: str, word: str) -> None:
    """Raises an error if a word has gone.

    Args:
        where: a key of REMOVED.
        word: the word that a user has typed.

    Raises:
        InvalidArgument: 0.3 does not have the word.
    """
    if text := _error_for(where, word):
        raise InvalidArgument(text)


def no_attribute(where: str, owner: str, name: str, advice: str = "") -> NoReturn:
    """Raises the error for an attribute that does not exist, or that has gone.

    Args:
        where: a key of REMOVED.
        owner: the owner in Python's own words, such as "module 'gradsync'".
        name: the attribute's name.
        advice: what to add for a name that was never there, such as ": did you mean all_reduce?".

    Raises:
        AttributeError: always; a RemovedName if the name has gone.
    """
    if text := _error_for(where, name):
        raise RemovedName(text)
    raise AttributeError(f"{owner} has no attribute {name!r}{advice}")


def no_module(name: str) -> NoReturn:
    """Raises the error for an import of a module that has gone.

    Args:
        name: the module's name in gradsync.

    Raises:
        RemovedModule: always.
    """
    raise RemovedModule(_error_for("gradsync", name))
