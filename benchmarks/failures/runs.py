"""Causes failures under a launcher: `gradsync run`, and functions called on ranks."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable, Sequence

from failures.confinement import Unavailable, frozen, small_memory
from failures.diary import READY
from failures.scene import Scene, SceneFailed

LAUNCHER = "launcher"
_SMALL_BYTES = 512 << 20
_STOPPED_SECONDS = 20.0  # far above what it takes the ranks to see it
WARNING = re.compile(r"rank 0 has waited .* for rank 1;")
_STOPPING = "Ctrl-C again kills"
_ENTER_AND_RUN = "import os, sys; open(sys.argv[1], 'w').write('0'); os.execv(sys.executable, sys.argv[2:])"

#: Causes a failure in a scene, and returns once the run has ended.
Play = Callable[[Scene], None]


def run(
    ranks: int,
    phase: str,
    fault: str,
    *options: str,
    grace: float = 5.0,
    backend: str = "auto",
    strike: Play | None = None,
    wrap: Sequence[str] = (),
) -> Play:
    """Makes a play of `gradsync run`.

    Args:
        ranks: number of ranks.
        phase, fault, options: what the ranks do, see `in_ranks`.
        grace: seconds that ranks get to end.
        backend: how their data move.
        strike: is called once all ranks have reached their phase; by default the culprit fails.
        wrap: a Python command line that starts the launcher.
    """
    command = ["-m", "gradsync", "run", "-n", str(ranks), "--grace", str(grace), "--backend", backend]
    command += ["-m", "failures.in_ranks"]

    def play(scene: Scene) -> None:
        scene.start(LAUNCHER, [*wrap, *command, phase, fault, *options])
        scene.wait_for_ranks(ranks)
        (strike or Scene.say_go)(scene)
        scene.wait_for_end(LAUNCHER)

    return play


def signalled(number: signal.Signals) -> Play:
    """Sends a signal to the launcher."""
    return lambda scene: scene.send(LAUNCHER, number)


def interrupt_twice(scene: Scene) -> None:
    """Ctrl-C, and after its answer a second one, which is the fault."""
    scene.send(LAUNCHER, signal.SIGINT)
    scene.wait_until(lambda: any(_STOPPING in line.text for line in scene.lines), "answer to Ctrl-C")
    scene.send(LAUNCHER, signal.SIGINT)


def stop_launcher(scene: Scene, then: Callable[[], None] = lambda: None) -> None:
    """Stops the launcher, and calls a function; lets it go on once its ranks have gone."""
    scene.send(LAUNCHER, signal.SIGSTOP)
    then()
    scene.down_at, left = scene.wait_for_processes(_STOPPED_SECONDS, scene.pid(LAUNCHER))
    os.kill(scene.pid(LAUNCHER), signal.SIGCONT)
    if left:
        raise SceneFailed(f"while the launcher was stopped, these ran on for {_STOPPED_SECONDS:.0f} s: {left}")


def wait_for_warning(scene: Scene) -> None:
    """Lets the culprit stall until a warning is printed."""
    scene.say_go()
    scene.wait_until(lambda: any(WARNING.search(line.text) for line in scene.lines), "warning")
    scene.end(LAUNCHER)


def freeze_a_rank(ranks: int) -> Play:
    """No signal reaches rank 1, and the run is to end."""
    return run(ranks, "all_reduce", "none", grace=1.0, strike=_end_while_frozen)


def _end_while_frozen(scene: Scene) -> None:
    victim = next(note.pid for note in scene.of(READY) if note.rank == 1)
    with frozen(victim):
        scene.send(LAUNCHER, signal.SIGTERM)
        scene.wait_for_end(LAUNCHER)
    scene.down_at = scene.ended_at(LAUNCHER)


def fill_memory(ranks: int) -> Play:
    """The culprit allocates until the kernel ends it, in a control group that holds the whole run."""

    def play(scene: Scene) -> None:
        with small_memory(_SMALL_BYTES) as door:
            if not door.with_name("memory.events").exists():
                raise Unavailable("only control groups of version 2 tell of their kills")
            wrap = ["-c", _ENTER_AND_RUN, str(door), sys.executable]
            run(ranks, "computing", "fill-memory", wrap=wrap)(scene)

    return play


def call(*arguments: str) -> Play:
    """Makes a play of a script that calls a function on ranks, see `in_functions`."""

    def play(scene: Scene) -> None:
        scene.start(LAUNCHER, ["-m", "failures.in_functions", *arguments])
        scene.wait_for_end(LAUNCHER)

    return play
