"""A file system that hangs, as one does whose server is gone: in place of files, pipes that nobody reads."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from gradsync.diagnostics import dump as whole_file


@contextlib.contextmanager
def hanging_files(folder: Path) -> Iterator[None]:
    """Has what gradsync writes hang within the block, below a folder; goes on with it at the end."""
    pipes: list[Path] = []
    temporary_path = whole_file._temporary_path

    def hanging_path(path: Path) -> Path:
        pipe = temporary_path(path)
        if not pipe.is_relative_to(folder):
            return pipe
        pipe.parent.mkdir(parents=True, exist_ok=True)
        os.mkfifo(pipe)
        pipes.append(pipe)
        return pipe

    whole_file._temporary_path = hanging_path
    try:
        yield
    finally:
        whole_file._temporary_path = temporary_path
        for pipe in pipes:
            _read_all(pipe)
        for thread in threading.enumerate():
            if thread.name == "gradsync-file":
                thread.join(30.0)
                assert not thread.is_alive(), "it hangs though it could go on"


def _read_all(pipe: Path) -> None:
    """Reads until its writer has written all: opening it lets the writer go on."""
    with contextlib.suppress(FileNotFoundError), pipe.open("rb") as file:
        file.read()
