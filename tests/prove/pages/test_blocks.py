"""Each Python block of the pages runs, and so do the commands for several machines."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import gradsync as gs
from page_blocks import PAGES, ROOT, blocks_of

TEXTS = {str(page.relative_to(ROOT)): page.read_text() for page in PAGES}
ONE_BOOTS_LATE = re.compile(r"gradsync: \d of \d ranks have joined; waiting for .*\n")  # on a very busy machine
SCRIPTS = {
    f"{name}-{number}": block.text
    for name, text in TEXTS.items()
    for number, block in enumerate(blocks_of(text))
    if block.runs_alone
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_python_blocks_run(tmp_path: Path, name: str) -> None:
    code = SCRIPTS[name]
    script = tmp_path / "block.py"
    script.write_text(code)
    alone = "__main__" in code  # it starts its own ranks
    launcher = [] if alone else ["-m", "gradsync", "run", "-n", "2"]
    done = subprocess.run(
        [sys.executable, *launcher, str(script)],
        capture_output=True, text=True, timeout=100, check=False, env=dict(os.environ),
    )  # fmt: skip
    assert (done.returncode, ONE_BOOTS_LATE.sub("", done.stderr)) == (0, ""), code
    expected = re.findall(r"by rank: (\[.*?\])", code)
    assert not expected or done.stdout.strip() == expected[0]


def test_the_commands_for_several_machines_run(tmp_path: Path) -> None:
    """With two launchers on this machine in place of two machines, and a rank each in place of eight."""
    marked = [block for block in blocks_of(TEXTS["docs/machines.md"]) if block.mark.startswith("run by")]
    block = marked[0].text.replace("head:29400", f"127.0.0.1:{gs.free_port()}").replace("-n 8", "-n 1")
    secret, *nodes = block.replace("gradsync run", f"{shlex.quote(sys.executable)} -m gradsync run").splitlines()
    (tmp_path / "train.py").write_text(
        "import gradsync as gs\n"
        "with gs.init_process_group('shm') as comm:\n"
        "    print(comm.objects.all_gather(comm.rank))\n"
    )
    subprocess.run(secret, shell=True, cwd=tmp_path, check=True, timeout=60)
    started = [
        subprocess.Popen(node, shell=True, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for node in nodes
    ]
    told = [process.communicate(timeout=100) for process in started]
    assert [process.returncode for process in started] == [0, 0], told
    assert [out for out, _ in told] == ["[rank 0] [0, 1]\n", "[rank 1] [0, 1]\n"]
