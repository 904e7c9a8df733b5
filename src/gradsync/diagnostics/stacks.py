"""The Python stacks of this process's threads, except gradsync's own, as text for reports to other ranks."""

from __future__ import annotations

import contextlib
import linecache
import os
import sys
import threading
from itertools import starmap
from operator import itemgetter
from types import CodeType, FrameType

from gradsync.errors import describe
from gradsync.machine import run_with_timeout

_MAX_BYTES = 8192  # the largest size of the report, in UTF-8
_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")
_STANDARD_LIBRARY = os.path.join(os.path.dirname(os.__file__), "")
_INSTALLED = os.path.join(_STANDARD_LIBRARY, "site-packages", "")
_LAUNCHING = os.path.join(_PACKAGE, "launching", "")
_SERVICE_THREADS = "gradsync-"  # the prefix of the names of gradsync's own threads
# How many innermost frames stack_report shows: the first number with which the text is short enough.
_FRAMES = (64, 32, 16, 8, 4, 2, 1)
_NAMES = 3
_LINE_CHARACTERS = 160
_SOURCE_SECONDS = 1.0  # for reading the lines of the program's files
_hanging: set[str] = set()  # files that could not be read in this time, and are not read again


def stack_report() -> str:
    """Returns the stacks of all threads except gradsync's own: the main thread first, the innermost frames first.

    Of nested calls within gradsync only the outermost is shown, and equal stacks once, with the names of up to three
    threads. Of a text that is too long, outer frames are left out. It never raises, and waits for one second at most,
    if the file system of a program's file hangs. Any thread may call it at any time.
    """
    try:
        return _report()
    except Exception as error:  # a report about a failure must not fail
        return f"(the stacks cannot be shown: {describe(error)})"[:_MAX_BYTES]


def _report() -> str:
    stacks = _stacks()
    text = ""
    for frames in _FRAMES:
        text = "\n".join([_stack_text(stack, names, frames) for stack, names in stacks.items()])
        if len(text.encode(errors="replace")) <= _MAX_BYTES:
            return text
    return text.encode(errors="replace")[:_MAX_BYTES].decode(errors="ignore")


def _stacks() -> dict[tuple[str, ...], list[str]]:
    """Returns the names of the threads by their stack; the main thread's comes first."""
    known = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    frames = [(ident != main, known.get(ident, f"thread {ident}"), f) for ident, f in sys._current_frames().items()]
    frames = [one for one in sorted(frames, key=itemgetter(0, 1)) if not one[1].startswith(_SERVICE_THREADS)]
    stacks = [(name, _shown(frame)) for _, name, frame in frames]
    _read_sources({code.co_filename for _, shown in stacks for code, _ in shown})
    by_stack: dict[tuple[str, ...], list[str]] = {}
    for name, shown in stacks:
        by_stack.setdefault(tuple(starmap(_line_text, shown)), []).append(name)
    return by_stack


def _shown(frame: FrameType | None) -> list[tuple[CodeType, int]]:
    """Returns code and line of each frame to show, innermost first; of nested calls in gradsync only the outermost."""
    shown: list[FrameType] = []
    while frame is not None:
        if shown and frame.f_code.co_filename.startswith(_LAUNCHING):
            break  # the outer frames are the launcher's, which has called the user's code
        if _is_ours(frame):
            while shown and _is_of_python(shown[-1]):
                shown.pop()  # gradsync has called this function of the standard library, for example a method of a lock
        if frame.f_code.co_filename not in (__file__, contextlib.__file__):
            if shown and _is_ours(shown[-1]) and _is_ours(frame):
                shown.pop()
            shown.append(frame)
        frame = frame.f_back
    return [(one.f_code, one.f_lineno or 0) for one in shown]  # some frames have no line number


def _read_sources(names: set[str]) -> None:
    """Reads the lines of files into linecache, unless their file system hangs."""
    unread = {name for name in names if name not in linecache.cache and not name.startswith("<")} - _hanging
    if not unread:
        return
    try:
        run_with_timeout(lambda: [linecache.getlines(name) for name in unread], "gradsync-source", _SOURCE_SECONDS)
    except TimeoutError:
        _hanging.update(unread)
    except RuntimeError:  # no thread can be started: the report has no source lines
        pass


def _is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_PACKAGE)


def _is_of_python(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    return name.startswith(_STANDARD_LIBRARY) and not name.startswith(_INSTALLED)


def _line_text(code: CodeType, number: int) -> str:
    source = linecache.getline(code.co_filename, number).strip() if code.co_filename in linecache.cache else ""
    place = f"  {code.co_filename}:{number} in {code.co_name}"
    return f"{place}\n    {source[:_LINE_CHARACTERS]}" if source else place


def _stack_text(stack: tuple[str, ...], names: list[str], frames: int) -> str:
    shown = ", ".join(names[:_NAMES])
    who = shown if len(names) == 1 else f"{len(names)} threads ({shown}{', ...' if len(names) > _NAMES else ''})"
    left_out = ["  ..."] if len(stack) > frames else []
    return "\n".join([f"{who}, innermost call first:", *stack[:frames], *left_out])
