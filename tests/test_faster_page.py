"""The page "Is it faster?": its ten lines and its commands run, and say what they promise."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[1] / "docs" / "faster.md").read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="ranks share memory on Linux")
def test_the_ten_lines_tell_the_time_of_a_step_with_each_number_of_ranks(tmp_path):
    [source] = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    [commands] = re.findall(r"```sh\n(.*?)```", PAGE, flags=re.DOTALL)
    (tmp_path / "faster.py").write_text(source)
    for ranks, line in enumerate(commands.splitlines(), 1):
        assert line == f"OMP_NUM_THREADS=1 gradsync run -n {ranks} faster.py"
        command = [sys.executable, "-m", *line.split()[1:]]
        environ = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False, timeout=60
        )
        assert (done.returncode, done.stderr) == (0, "")
        told = rf"(\[rank 0\] )?{ranks} ranks, 1 threads each: \S+ ms a step, \d+ % of it in gradsync\n"
        assert re.fullmatch(told, done.stdout), done.stdout
