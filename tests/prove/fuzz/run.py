"""Fuzzes what takes bytes from outside, and keeps what leads somewhere new.

    python tests/prove/fuzz/run.py frames --seconds 60    # or `all`: each of them for so long
    python tests/prove/fuzz/run.py --list

With atheris (`pip install atheris`) libFuzzer follows which lines of gradsync an input reaches; without it inputs are
mutated blindly, which finds less, and the corpus stays as it is. An input under which a target fails is written to
tests/prove/fuzz/failures, and the exit code is 1. A test replays the corpus, and needs no fuzzer.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import random
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

FOLDER = Path(__file__).parent
CORPUS, FAILURES = FOLDER / "corpus", FOLDER / "failures"
_MOST_FILES = 40  # of a target in the corpus
_MOST_BYTES = 4096
_HAS_ATHERIS = importlib.util.find_spec("atheris") is not None


def fuzz_with_atheris(name: str, seconds: float) -> int:
    """Fuzzes in a process of its own, which libFuzzer ends, and then merges what was found into the corpus."""
    corpus = CORPUS / name
    FAILURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as work, tempfile.TemporaryDirectory() as merged:
        for file in _begin_with(name, Path(work)).iterdir():
            shutil.copy(file, merged)
        limits = [f"-max_total_time={seconds:g}", f"-max_len={_MOST_BYTES}", "-rss_limit_mb=1024", "-timeout=5"]
        code = _child(name, work, *limits, f"-artifact_prefix={FAILURES}/{name}-")
        shutil.rmtree(merged)
        Path(merged).mkdir()
        _child(name, "-merge=1", merged, work)
        _replace(corpus, sorted(Path(merged).iterdir(), key=lambda file: file.stat().st_size)[:_MOST_FILES])
    if not any(FAILURES.iterdir()):
        FAILURES.rmdir()
    return code


def _child(name: str, *arguments: str) -> int:
    command = [sys.executable, str(FOLDER / "run.py"), "--child", name, *arguments]
    return subprocess.run(command, check=False).returncode


def _in_child(name: str, arguments: list[str]) -> None:
    import atheris

    with atheris.instrument_imports(include=["gradsync"]):
        import targets
    again = f"{sys.executable} {FOLDER / 'run.py'} --child {name}"  # libFuzzer merges in processes of its own
    atheris.Setup([again, *arguments], targets.TARGETS[name])
    atheris.Fuzz()


def _begin_with(name: str, folder: Path) -> Path:
    """Fills a folder with the corpus of a target and its seeds."""
    from seeds import seeds

    for data in [*seeds()[name], *(file.read_bytes() for file in files_of(name))]:
        (folder / hashlib.sha1(data).hexdigest()).write_bytes(data)
    return folder


def _replace(corpus: Path, files: list[Path]) -> None:
    shutil.rmtree(corpus, ignore_errors=True)
    corpus.mkdir(parents=True)
    for file in files:
        data = file.read_bytes()
        (corpus / hashlib.sha1(data).hexdigest()[:12]).write_bytes(data)


def files_of(name: str) -> list[Path]:
    """Returns the corpus of a target."""
    return sorted((CORPUS / name).glob("*"))


def fuzz_blindly(name: str, seconds: float, seed: int) -> int:
    """Mutates seeds and corpus at random."""
    from seeds import seeds
    from targets import TARGETS

    rng = random.Random(seed)
    known = [*seeds()[name], *(file.read_bytes() for file in files_of(name))]
    count, deadline = 0, time.monotonic() + seconds
    while time.monotonic() < deadline:
        data = mutate(rng, known)
        count += 1
        try:
            TARGETS[name](data)
        except Exception:
            FAILURES.mkdir(exist_ok=True)
            path = FAILURES / f"{name}-{hashlib.sha1(data).hexdigest()[:12]}"
            path.write_bytes(data)
            traceback.print_exc()
            print(f"{name}: failed with {path} (seed {seed})")
            return 1
    print(f"{name}: {count} inputs without atheris (pip install atheris): mutated blindly, seed {seed}; none failed")
    return 0


def mutate(rng: random.Random, known: list[bytes]) -> bytes:
    """Returns one of the known inputs with some bytes altered, left out, repeated, or taken from another one."""
    data = bytearray(rng.choice(known))
    for _ in range(rng.randint(1, 6)):
        at = rng.randrange(len(data) + 1)
        end = min(len(data), at + rng.randint(1, 8))
        other = rng.choice(known)
        start = rng.randrange(len(other) + 1)
        pieces = (rng.randbytes(end - at), b"", bytes(data[at:end]) * 2, other[start : start + rng.randint(1, 30)])
        data[at:end] = rng.choice((*pieces, b"\xff" * (end - at)))
    return bytes(data[:_MOST_BYTES])


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        _in_child(sys.argv[2], sys.argv[3:])
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", nargs="?", default="all")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each target [60]")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(32), help="without atheris")
    parser.add_argument("--blindly", action="store_true", help="even where atheris is installed")
    parser.add_argument("--list", action="store_true", help="list the targets, and end")
    options = parser.parse_args()
    from targets import TARGETS

    if options.list or options.target not in (*TARGETS, "all"):
        print("\n".join(TARGETS))
        return 0 if options.list else 2
    codes = []
    for name in TARGETS if options.target == "all" else [options.target]:
        if _HAS_ATHERIS and not options.blindly:
            codes.append(fuzz_with_atheris(name, options.seconds))
        else:
            codes.append(fuzz_blindly(name, options.seconds, options.seed))
    return 1 if any(codes) else 0


if __name__ == "__main__":
    sys.exit(main())
