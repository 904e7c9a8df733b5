"""A call as bytes, for ranks that start afresh: by pickle, and by cloudpickle where pickle refuses.

A rank needs `pickle.loads` only; what cloudpickle wrote imports cloudpickle by itself.
"""

from __future__ import annotations

import io
import operator
import sys
from collections import ChainMap
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from pickle import PicklingError
from types import FunctionType
from typing import Any, ClassVar

from gradsync.errors import InvalidArgument
from gradsync.launching.in_rank.conventions import Call

_Dumps = Callable[[Any], bytes]


def pickle_call(call: Call, name: str, *, ranks_import_main: bool) -> bytes:
    """Pickles a call, all in one, so that what its parts share stays shared.

    Args:
        call: the call.
        name: what errors call the function.
        ranks_import_main: whether ranks can import this process's `__main__`; they cannot when it is an interactive
            session, and then its functions and classes travel by value.

    Raises:
        InvalidArgument: the function or an argument does not pickle.
    """

    def plain(thing: Any) -> bytes:
        return _plain_dumps(thing, ranks_import_main)

    try:
        return plain(call)
    except Exception as error:
        refusal = error
    by_value = _find_cloudpickle(ranks_import_main)
    if by_value is None:
        raise InvalidArgument(_explain(call, name, plain, refusal, ("pip install cloudpickle",)))
    try:
        return by_value(call)
    except Exception as error:
        raise InvalidArgument(_explain(call, name, by_value, error, ())) from None


class _PlainPickler(ForkingPickler):
    """Refuses what a rank would look for in a `__main__` that it does not have."""

    def reducer_override(self, thing: Any) -> Any:
        if _is_of_main(thing):
            raise PicklingError(f"{thing.__qualname__} is defined in an interactive session, which ranks cannot import")
        return NotImplemented


def _plain_dumps(thing: Any, ranks_import_main: bool) -> bytes:
    buffer = io.BytesIO()
    (ForkingPickler if ranks_import_main else _PlainPickler)(buffer).dump(thing)
    return buffer.getvalue()


def _find_cloudpickle(ranks_import_main: bool) -> _Dumps | None:
    """Returns a function that pickles by value what cannot go by name, if cloudpickle is installed."""
    try:
        import cloudpickle
    except ImportError:
        return None

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        # Connections and locks of multiprocessing know how to travel; read when a pickler is made.
        dispatch_table: ClassVar = ChainMap(
            ForkingPickler(io.BytesIO()).dispatch_table, cloudpickle.Pickler.dispatch_table
        )

        def reducer_override(self, thing: Any) -> Any:
            # cloudpickle would copy these too, and an instance would be of another class than the rank's own.
            if ranks_import_main and _is_of_main(thing) and _is_found_by_name(thing):
                return NotImplemented
            return super().reducer_override(thing)

    def dumps(thing: Any) -> bytes:
        buffer = io.BytesIO()
        Pickler(buffer).dump(thing)
        return buffer.getvalue()

    return dumps


def _is_of_main(thing: Any) -> bool:
    return isinstance(thing, type | FunctionType) and thing.__module__ == "__main__"


def _is_found_by_name(thing: Any) -> bool:
    try:
        return operator.attrgetter(thing.__qualname__)(sys.modules["__main__"]) is thing
    except AttributeError:
        return False


def _explain(call: Call, name: str, dumps: _Dumps, error: Exception, remedies: tuple[str, ...]) -> str:
    """Says which part of a call does not pickle, why, and what to do."""
    for part, thing, remedy in _parts_of(call, name):
        try:
            dumps(thing)
        except Exception as part_error:
            helps = () if isinstance(part_error, TypeError) else remedies  # what no pickler can do
            *first, last = remedy, *helps, 'start ranks by fork (gs.set_start_method("fork"))'
            advice = f"{', '.join(first)}, or {last}"
            return f"{part} needs to pickle to reach the ranks: {part_error}; {advice}"
    return f"the call of {name} needs to pickle to reach the ranks: {error}"


def _parts_of(call: Call, name: str) -> Iterator[tuple[str, Any, str]]:
    """Gives each part of a call: what it is called, the part, and what helps when it does not pickle."""
    function, arguments, keywords = call
    yield name, function, "define it at the top level of a module or script"
    for position, value in enumerate(arguments):
        yield f"args[{position}] of {name}", value, "make it inside the function"
    for key, value in keywords.items():
        yield f"argument {key} of {name}", value, "make it inside the function"
