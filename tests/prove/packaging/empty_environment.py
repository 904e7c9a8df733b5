"""An environment with gradsync's wheel, what it declares to need, and nothing else: made without a network."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from importlib.metadata import Distribution, distribution
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[3]


def files_of_the_repository() -> set[str]:
    """Returns what is, or would be, under version control."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True)
    return {path for path in done.stdout.splitlines() if (ROOT / path).is_file()}


def build(folder: Path) -> tuple[Path, Path]:
    """Builds an sdist from a copy of the repository, and a wheel from that sdist; returns both."""
    source, built = folder / "source", folder / "dist"
    for path in files_of_the_repository():
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, source / path)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(built), str(source)]
    done = subprocess.run(command, env=_variables(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    [sdist], [wheel] = built.glob("*.tar.gz"), built.glob("*.whl")
    return sdist, wheel


class Environment(NamedTuple):
    """A virtual environment.

    Attributes:
        folder: its own.
    """

    folder: Path

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin" / "python"

    def run(self, *words: str | Path, cwd: Path) -> tuple[int, str]:
        """Runs a program of the environment, which sees nothing of this one; returns its exit code and its output."""
        done = subprocess.run(
            [str(self.folder / "bin" / words[0]), *map(str, words[1:])],
            cwd=cwd,
            env=_variables(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
            check=False,
        )
        return done.returncode, done.stdout


def environment_with(wheel: Path, folder: Path) -> Environment:
    """Makes an environment with a wheel, and links to what it needs, as this environment has it."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    environment = Environment(folder)
    pip = [sys.executable, "-m", "pip", "--python", str(environment.python), "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--quiet", "--no-index", "--no-deps", str(wheel)], env=_variables(), check=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    [metadata] = packages.glob("gradsync-*.dist-info")
    for needed in _all_needed(Distribution.at(metadata)):
        for path in {Path(file.parts[0]) for file in needed.files or () if ".." not in file.parts}:
            if not (packages / path).exists() and path.name != "__pycache__":
                (packages / path).symlink_to(Path(str(needed.locate_file(path))).resolve())
    return environment


def _variables() -> dict[str, str]:
    """Returns the environment variables without those that would lead Python back here."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "GRADSYNC"))}


def _all_needed(package: Distribution, known: frozenset[str] = frozenset()) -> Iterator[Distribution]:
    """Yields what a package declares to need without its extras, and what that needs."""
    for line in package.requires or ():
        name = re.split(r"[^\w.-]", line, maxsplit=1)[0]
        if ";" not in line and name not in known:  # none of what gradsync needs depends on the platform
            found = distribution(name)
            yield found
            yield from _all_needed(found, known | {name})
