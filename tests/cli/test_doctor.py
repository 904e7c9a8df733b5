"""`gradsync doctor` on this machine, whole and broken in various ways; made-up machines: test_doctor_checks.py."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest

from ranks import PLACES

FAKE = PLACES["fake"].folders[0]


@pytest.fixture
def doctor(cli):
    """doctor(*arguments, path=[folders of Python], **variables) gives the exit code and what was found."""

    def run(*arguments, path=(), before=(), **variables):
        inherited = [*map(str, path), *filter(None, [os.environ.get("PYTHONPATH")])]
        done = cli.program(
            *before, sys.executable, "-m", "gradsync", "doctor", "--json", *arguments,
            environment={"PYTHONPATH": os.pathsep.join(inherited), **variables},
        )  # fmt: skip
        assert done.err == ""
        found = json.loads(done.out)
        found["lines"] = {finding["what"]: finding for finding in found["findings"]}
        return done.code, found

    return run


def test_shared_memory_works_here(doctor):
    code, found = doctor("--backend", "shm", "--timeout", "60")
    assert (code, found["ready"], found["working"]) == (0, True, ["shm"])
    assert found["trials"]["shm"]["status"] == "ok"
    assert "local" not in found["trials"]  # one rank alone, which nobody asked for


def test_a_person_reads_lines_and_a_verdict(cli):
    done = cli("doctor", "--no-try", environment={"GRADSYNC_SECRET": "5a" * 32})
    assert "Nothing is broken; no backend was tried." in done.out
    assert "5a5a" not in done.out + done.err  # a secret is never shown


def test_the_fake_cupy_is_not_taken_for_a_gpu(doctor):
    code, found = doctor("--backend", "nccl", path=[FAKE])
    assert (code, found["working"]) == (1, [])
    assert found["trials"]["nccl"]["text"] == "this machine has no NVIDIA GPU"


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV"),
        ("raise OSError('libcuda.so.1: cannot open')", "libcuda.so.1"),
        ("raise ImportError('libcublas is missing')", "libcublas is missing"),
    ],
)
def test_a_library_that_dies_when_it_is_loaded_is_a_line(doctor, tmp_path, source, word):
    (tmp_path / "cupy.py").write_text(source)
    (tmp_path / "cupy_cuda12x-14.2.0.dist-info").mkdir()
    (tmp_path / "cupy_cuda12x-14.2.0.dist-info" / "METADATA").write_text("Name: cupy-cuda12x\nVersion: 14.2.0\n")
    _, found = doctor("--no-try", path=[tmp_path])
    assert "cupy-cuda12x does not load" in found["lines"]["CuPy"]["text"]
    assert word in found["lines"]["CuPy"]["text"]


def test_variables_that_are_wrong_are_named(doctor):
    variables = {"GRADSYNC_BACKED": "shm", "GRADSYNC_LOG": "loud", "RANK": "1", "WORLD_SIZE": "4"}
    code, found = doctor("--no-try", **variables)
    assert (code, found["ready"]) == (1, False)
    assert "GRADSYNC_LOG" in found["verdict"]
    assert "did you mean GRADSYNC_BACKEND?" in found["lines"]["GRADSYNC_BACKED"]["text"]
    assert "unset RANK WORLD_SIZE" in found["lines"]["launcher"]["advice"]


BROKEN_RANK = """
import builtins, os, sys, time
original = builtins.__import__
def imported(name, *arguments, **options):
    if name == "rich.console" and os.environ.get("RANK") == "1":  # as `python -m gradsync.doctor` begins
        {what}
    return original(name, *arguments, **options)
builtins.__import__ = imported
"""


WRONG_SUMS = (
    "from gradsync.communicators.communicator import Communicator as Whole; right = Whole.all_reduce; "
    "Whole.all_reduce = lambda self, array: right(self, array).__imul__(0)"
)


@pytest.mark.parametrize(
    ("what", "limit", "word"),
    [
        ("time.sleep(600)", "6", "no answer within 6 s"),
        ("sys.exit('no memory left')", "60", "rank 1"),
        ("os.kill(os.getpid(), 11)", "60", "was killed by SIGSEGV"),
        ("raise OSError('libmpi is missing')", "60", "OSError: libmpi is missing"),
        (WRONG_SUMS, "60", "4,194,304 of 4,194,304 sums on rank 1 are wrong"),
    ],
    ids=["hangs", "exits", "crashes", "raises", "wrong sums"],
)
def test_a_trial_whose_ranks_hang_or_die_is_a_line_and_leaves_nothing(doctor, tmp_path, what, limit, word):
    (tmp_path / "sitecustomize.py").write_text(BROKEN_RANK.format(what=what))  # each Python imports it as it starts
    code, found = doctor("--backend", "shm", "--timeout", limit, path=[tmp_path])
    assert (code, found["trials"]["shm"]["status"]) == (1, "broken")
    assert word in found["trials"]["shm"]["text"]
    assert "shm does not work here" in found["verdict"]


def test_a_tiny_shared_memory_folder_is_a_line(doctor):
    namespace = ["unshare", "--map-root-user", "--mount"]
    if shutil.which("unshare") is None or subprocess.run([*namespace, "true"], capture_output=True).returncode:
        pytest.skip("no mount namespaces here")
    mount = 'mount -t tmpfs -o size=4m tmpfs /dev/shm && exec "$@"'
    _, found = doctor("--no-try", before=[*namespace, "sh", "-c", mount, "sh"])
    assert found["lines"]["/dev/shm"]["text"].startswith("4 MB, 4 MB free: too small for NCCL")
    assert "--shm-size=1g" in found["lines"]["/dev/shm"]["advice"]


@pytest.mark.parametrize("module", ["numpy", "rich"])
def test_without_what_gradsync_stands_on_it_says_what_to_type(cli, tmp_path, module):
    (tmp_path / f"{module}.py").write_text("raise ImportError('damaged')")
    done = cli("doctor", "--no-try", environment={"PYTHONPATH": str(tmp_path)})
    assert done.code == 1
    assert "does not load here (damaged): pip install" in done.err
    assert "Traceback" not in done.err
