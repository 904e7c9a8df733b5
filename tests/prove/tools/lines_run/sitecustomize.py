"""Writes down which lines of gradsync each test runs, in every process of it; for planted.py, by way of PYTHONPATH.

Needs Python 3.12: what it costs there is one call for each line of each process. LINES_RUN names a folder. In there
each worker of pytest keeps the name of its current test (see lines_run.py), and each process writes a file of its own:
the test, a tab, the file, a colon and the line.
"""

import os
import sys

_FOLDER = os.environ.get("LINES_RUN")
_MARK = "/src/gradsync/"


class _Writer:
    """Appends to a file of this process, line by line: some processes of tests are killed."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._descriptor = -1
        self._test = ""
        sys.monitoring.use_tool_id(sys.monitoring.COVERAGE_ID, "lines run")
        sys.monitoring.register_callback(sys.monitoring.COVERAGE_ID, sys.monitoring.events.LINE, self._line)
        self.begin()
        os.register_at_fork(after_in_child=self.begin)

    def begin(self) -> None:
        """Begins anew: with another test, or in another process."""
        self._descriptor = -1
        try:
            with open(f"{self._folder}/current-{os.environ.get('PYTEST_XDIST_WORKER', 'main')}") as file:
                self._test = file.read()
        except FileNotFoundError:
            self._test = ""
        sys.monitoring.set_events(sys.monitoring.COVERAGE_ID, sys.monitoring.events.LINE)
        sys.monitoring.restart_events()

    def _line(self, code: object, number: int) -> object:
        file = code.co_filename  # type: ignore[attr-defined]
        at = file.find(_MARK)
        if at >= 0 and self._test:
            if self._descriptor < 0:
                path = f"{self._folder}/{os.getpid()}.lines"
                self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            os.write(self._descriptor, f"{self._test}\t{file[at + 1 :]}:{number}\n".encode())
        return sys.monitoring.DISABLE


writer = _Writer(_FOLDER) if _FOLDER else None
