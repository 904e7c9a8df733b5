"""`make prove`: it runs what is there, sums it up, and fails when a proof fails."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

import prove

ROOT = Path(__file__).parents[2]
HOLDS = "import json, sys; json.dump({'summary': {'kills': 1200, 'text': 'x'}}, open(sys.argv[-1], 'w'))"
FAILS = "print('a wrong culprit'); raise SystemExit(3)"


def proof_of(folder: Path, name: str, code: str, result: str | None) -> prove.Proof:
    script = folder / f"{name}.py"
    script.write_text(code)
    return prove.Proof(name, f"what {name} proves", (str(script), "--long"), ("--short",), result)


@pytest.fixture
def _two_proofs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proofs = (proof_of(tmp_path, "first", HOLDS, "proof_first"), proof_of(tmp_path, "second", FAILS, None))
    monkeypatch.setattr(prove, "PROOFS", proofs)
    monkeypatch.setattr(prove, "RESULTS", tmp_path)


@pytest.mark.usefixtures("_two_proofs")
def test_results_are_kept_and_a_failure_is_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["prove.py"])
    assert prove.main() == 1
    printed = capsys.readouterr().out
    assert "kills 1,200" in printed
    assert "NO (3)" in printed
    assert "a wrong culprit" in printed
    assert json.loads((tmp_path / "proof_first.json").read_text())["summary"]["kills"] == 1200


@pytest.mark.usefixtures("_two_proofs")
def test_quick_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["prove.py", "--quick", "--only", "first"])
    assert prove.main() == 0
    assert not (tmp_path / "proof_first.json").exists()


def test_every_proof_has_a_script_and_a_name_of_its_own() -> None:
    assert [proof.command[0] for proof in prove.PROOFS if not (ROOT / proof.command[0]).exists()] == []
    assert len({proof.name for proof in prove.PROOFS}) == len(prove.PROOFS)


def test_make_prove_runs_it() -> None:
    recipe = (ROOT / "Makefile").read_text().partition("\nprove:")[2].splitlines()[1]
    assert recipe.endswith("tests/prove.py")
