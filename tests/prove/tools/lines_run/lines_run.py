"""A plugin of pytest that tells sitecustomize.py, beside it, which test runs, and writes how long each took."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import sitecustomize

_FOLDER = Path(os.environ["LINES_RUN"])
_WORKER = os.environ.get("PYTEST_XDIST_WORKER", "main")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    (_FOLDER / f"current-{_WORKER}").write_text(item.nodeid)
    sitecustomize.writer.begin()
    return (yield)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" and report.passed and _WORKER == "main":
        with (_FOLDER / "seconds").open("a") as file:
            file.write(json.dumps([report.nodeid, round(report.duration, 3)]) + "\n")
