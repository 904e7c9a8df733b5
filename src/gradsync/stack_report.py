"""Where the threads of this process are: their Python stacks, as text for a report that other ranks read."""

from __future__ import annotations

import contextlib
import linecache
import os
import sys
import threading
from operator import itemgetter
from types import FrameType

from gradsync.errors import describe

MAX_BYTES = 8192
_PACKAGE = os.path.join(os.path.dirname(__file__), "")
_STANDARD_LIBRARY = os.path.join(os.path.dirname(os.__file__), "")
_INSTALLED = os.path.join(_STANDARD_LIBRARY, "site-packages", "")
_LAUNCHING = os.path.join(_PACKAGE, "launching", "")
_SERVICE_THREADS = "gradsync-"  # how the names of gradsync's own threads begin
# How many of the innermost frames of a thread are shown: the first number with which everything fits.
_FRAMES = (64, 32, 16, 8, 4, 2, 1)
_NAMES = 3
_LINE_CHARACTERS = 160


def stack_report(max_bytes: int = MAX_BYTES) -> str:
    """Returns the stacks of all threads but gradsync's own: the main thread's first, each from its innermost frame on.

    Of calls within gradsync only the first is shown. Threads with equal stacks share one. Outer frames are left out
    where not everything fits. Never raises, and takes milliseconds, so that any thread may call it at any time.

    Args:
        max_bytes: how long the text may be, in UTF-8.
    """
    try:
        return _report(max_bytes)
    except Exception as error:  # a report about a failure must not be another one
        return f"(the stacks cannot be told: {describe(error)})"[:max_bytes]


def _report(max_bytes: int) -> str:
    stacks = _stacks()
    text = ""
    for frames in _FRAMES:
        text = "\n".join([_told(stack, names, frames) for stack, names in stacks.items()])
        if len(text.encode(errors="replace")) <= max_bytes:
            return text
    return text.encode(errors="replace")[:max_bytes].decode(errors="ignore")


def _stacks() -> dict[tuple[str, ...], list[str]]:
    """Returns the names of the threads by their stacks, the main thread's first."""
    known = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    frames = [(ident != main, known.get(ident, f"thread {ident}"), f) for ident, f in sys._current_frames().items()]
    by_stack: dict[tuple[str, ...], list[str]] = {}
    for _, name, frame in sorted(frames, key=itemgetter(0, 1)):
        if not name.startswith(_SERVICE_THREADS):
            by_stack.setdefault(_stack_of(frame), []).append(name)
    return by_stack


def _stack_of(frame: FrameType | None) -> tuple[str, ...]:
    """Returns a text for each frame, the innermost first; of calls within gradsync the one from outside only."""
    shown: list[FrameType] = []
    while frame is not None and len(shown) < _FRAMES[0]:
        if shown and frame.f_code.co_filename.startswith(_LAUNCHING):
            frame = None  # from here on out it is what called the user's code
            break
        if _is_ours(frame):
            while shown and _is_of_python(shown[-1]):
                shown.pop()  # what gradsync calls, such as a lock
        if frame.f_code.co_filename not in (__file__, contextlib.__file__):
            if shown and _is_ours(shown[-1]) and _is_ours(frame):
                shown.pop()
            shown.append(frame)
        frame = frame.f_back
    texts = [_frame_text(one) for one in shown]
    if frame is not None:
        texts.append("")  # there is more, which is never shown
    return tuple(texts)


def _is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_PACKAGE)


def _is_of_python(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    return name.startswith(_STANDARD_LIBRARY) and not name.startswith(_INSTALLED)


def _frame_text(frame: FrameType) -> str:
    code, number = frame.f_code, frame.f_lineno or 0  # some frames have no line
    source = linecache.getline(code.co_filename, number).strip()
    place = f"  {code.co_filename}:{number} in {code.co_name}"
    return f"{place}\n    {source[:_LINE_CHARACTERS]}" if source else place


def _told(stack: tuple[str, ...], names: list[str], frames: int) -> str:
    shown = ", ".join(names[:_NAMES])
    who = shown if len(names) == 1 else f"{len(names)} threads ({shown}{', ...' if len(names) > _NAMES else ''})"
    left_out = ["  ..."] if len(stack) > frames else []
    return "\n".join([f"{who}, innermost call first:", *stack[:frames], *left_out])
