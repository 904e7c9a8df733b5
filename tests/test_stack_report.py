"""The stack report says where every thread of the user's is, and never fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_what_called_the_users_code_is_left_out(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("from gradsync.diagnostics.stacks import stack_report\nprint(stack_report())\n")
    command = [sys.executable, "-m", "gradsync", "run", "-n", "1", str(script)]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert told == f"MainThread, innermost call first:\n  {script}:2 in <module>\n    print(stack_report())\n"
