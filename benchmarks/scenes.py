"""Records the output of failures on a terminal, and makes pictures of it.

    python benchmarks/scenes.py          # writes docs/scenes/*.cast and *.svg

A .cast is asciinema's format, version 2: a line of JSON for the terminal, then one for each line that was printed, with
its time; `asciinema play docs/scenes/killed.cast` shows it as it was. The picture has the same text, and Rich makes it.
The programs run on a terminal of their own, with colours and all; only paths of this machine are cut short.
"""

from __future__ import annotations

import io
import json
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from dataclasses import dataclass
from fcntl import ioctl
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from readme import ROOT, SAME_EVERYWHERE, programs

FOLDER = ROOT / "docs" / "scenes"
COLUMNS, ROWS = 132, 40
_PATHS = SAME_EVERYWHERE[:4]
_READ_BYTES = 1 << 16
_TYPING_SECONDS = 0.5
_LONGEST_PAUSE_SECONDS = 2.0  # of a player; the times in the file are the real ones


@dataclass(frozen=True)
class Scene:
    """A failure to be shown.

    Attributes:
        name: of its files.
        title: of its picture.
        command: as it is typed.
    """

    name: str
    title: str
    command: str


SCENES = (
    Scene("killed", "a rank is killed in a backward pass", "gradsync run -n 3 examples/failures/dies.py"),
    Scene(
        "disagreeing",
        "two ranks disagree on the order of gradients",
        "gradsync run -n 2 examples/failures/disagrees.py",
    ),
    Scene("stuck", "a rank is stuck in its data loader", "gradsync run -n 2 examples/failures/stalls.py"),
)

#: Seconds from the start, and a line as the terminal got it, its end included.
Event = tuple[float, str]


def record(command: str) -> list[Event]:
    """Runs a command on a terminal of its own; returns its lines with their times."""
    master, slave = pty.openpty()
    ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    with tempfile.TemporaryDirectory() as folder:
        paths = f"{programs(Path(folder))}:{os.environ['PATH']}"
        began = time.monotonic()
        process = subprocess.Popen(
            ["/bin/sh", "-c", f"exec {command}"],
            cwd=ROOT,
            env=os.environ | {"PATH": paths, "TERM": "xterm-256color"},
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
        )
        os.close(slave)
        events = [(seconds - began, shortened(line)) for seconds, line in _lines_from(master)]
        process.wait()
    os.close(master)
    return [event for event in events if event[1]]


def _lines_from(descriptor: int) -> Iterator[Event]:
    """Yields complete lines until the last program closes the terminal."""
    begun = ""
    while True:
        try:
            chunk = os.read(descriptor, _READ_BYTES)
        except OSError:  # Linux's error once no process has it open
            chunk = b""
        if not chunk:
            break
        *lines, begun = (begun + chunk.decode(errors="replace")).split("\n")
        yield from ((time.monotonic(), f"{line}\n") for line in lines)
    if begun:
        yield time.monotonic(), begun


def shortened(line: str) -> str:
    """Shortens the paths of this machine, as in the pages."""
    for pattern, replacement in _PATHS:
        line = re.sub(pattern, replacement, line)
    return line


def cast_of(scene: Scene, events: list[Event]) -> str:
    """Returns the recording in asciinema's format, with the command as if it were typed."""
    header = {
        "version": 2,
        "width": COLUMNS,
        "height": ROWS,
        "idle_time_limit": _LONGEST_PAUSE_SECONDS,
        "title": f"gradsync: {scene.title}",
        "env": {"TERM": "xterm-256color"},
    }
    typed: list[Event] = [(0.0, f"$ {scene.command}\r\n")]
    later = [(seconds + _TYPING_SECONDS, text) for seconds, text in events]
    lines = [json.dumps(header), *(json.dumps([round(at, 3), "o", text]) for at, text in typed + later)]
    return "\n".join(lines) + "\n"


def picture_of(scene: Scene, events: list[Event]) -> str:
    """Returns the final content of the terminal as an SVG."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text.assemble(("$ ", "bold green"), (scene.command, "bold")))
    printed = "".join(text for _, text in events).replace("\r\n", "\n").rstrip("\n")
    console.print(Text.from_ansi(printed))
    # Its names must not depend on the text: equal pictures are equal files.
    return console.export_svg(title=scene.title, theme=MONOKAI, unique_id=f"scene-{scene.name}")


def main() -> int:
    """Records all scenes."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for scene in SCENES:
        events = record(scene.command)
        (FOLDER / f"{scene.name}.cast").write_text(cast_of(scene, events))
        (FOLDER / f"{scene.name}.svg").write_text(picture_of(scene, events))
        print(f"{scene.name}: {len(events)} lines in {events[-1][0]:.1f} s: {shlex.quote(scene.command)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
