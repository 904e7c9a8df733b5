"""README.md is true: its program is the example's, and its commands print what it says."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_program_is_the_example() -> None:
    assert f"```python\n{(ROOT / 'examples' / 'own_loop.py').read_text()}```\n" in README


@pytest.mark.skipif(sys.platform != "linux", reason="ranks share memory on Linux")
def test_commands_print_what_the_readme_says() -> None:
    shown = re.findall(r"```console\n\$ gradsync ([^\n]+)\n(.*?)```", README, flags=re.DOTALL)
    assert shown
    for words, output in shown:
        command = [sys.executable, "-m", "gradsync", *words.split()]
        done = subprocess.run(
            command, cwd=ROOT, env=os.environ, capture_output=True, text=True, check=False, timeout=100
        )
        assert (done.returncode, done.stdout) == (0, output), done.stderr
