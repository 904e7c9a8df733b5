"""The files that a measurement writes: refused before anything is measured for them, and JSON in one form."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from gradsync.bench.picture import check_plotting
from gradsync.errors import InvalidArgument


def check_outputs(json_path: str | None, plot_path: str | None) -> None:
    """Refuses a file that could not be written, after all has been measured for it.

    Raises:
        InvalidArgument: it cannot be.
        BackendUnavailable: there is nothing to draw a picture with.
    """
    for path in filter(None, (json_path, plot_path)):
        folder = os.path.dirname(path) or "."
        if not os.path.isdir(folder):
            raise InvalidArgument(f"{path!r} cannot be written: there is no folder {folder!r}")
        if os.path.isdir(path) or not os.access(path if os.path.exists(path) else folder, os.W_OK):
            raise InvalidArgument(f"{path!r} cannot be written")
    if plot_path is not None:
        check_plotting()


def write_json(path: str | None, made: dict[str, Any], result: dict[str, Any]) -> None:
    """Writes a result with where, when and how it was made, and says so; nothing where no file was asked for.

    Args:
        path: of the file.
        made: what `provenance` gave before anything was measured.
        result: the rest.
    """
    if path is None:
        return
    made["machine"]["load_average_after"] = os.getloadavg()[0]
    Path(path).write_text(json.dumps({**made, **result}, indent=2) + "\n")
    print(f"written to {path}")
