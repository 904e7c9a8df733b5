"""What is explored: each configuration has the ranks do one kind of thing, with every order of mishaps around it."""

from __future__ import annotations

from exploration.configuration import Configuration
from exploration.steps import (
    LONG_MS,
    SHORT_MS,
    Launch,
    absent,
    add,
    agree,
    barrier,
    delete,
    forget,
    get_id,
    get_key,
    put_id,
    set_key,
    waiting,
)

CONFIGURATIONS = (
    Configuration(
        "meeting",
        "three ranks join with deadlines of their own, give up, leave, die and come again, in up to two attempts",
        programs=((), (), ()),
        join_ms=(SHORT_MS, LONG_MS, LONG_MS),
        is_formed=False,
        attempts=2,
        rare={"crash": 1, "reset": 1, "leave": 2},
    ),
    Configuration(
        "host",
        "the rank that hosts the server joins for a shorter time than the others: with it nobody waits any longer",
        programs=((), (), ()),
        join_ms=(SHORT_MS, LONG_MS, LONG_MS),
        is_formed=False,
        attempts=2,
        host=0,
        rare={"crash": 1, "leave": 1},
    ),
    Configuration(
        "older generation",
        "connections are lost while their ranks live on and join again; others pose as ranks that are there",
        programs=((), (), ()),
        attempts=2,
        is_formed=False,
        rare={"reset": 3, "impostor": 1},
    ),
    Configuration(
        "barrier",
        "rounds of a barrier of all and one of two ranks, with deadlines that end one before the other",
        programs=(
            (barrier(timeout_ms=SHORT_MS), barrier("pair", ranks=(0, 1)), barrier()),
            (barrier(), barrier("pair", ranks=(0, 1), timeout_ms=SHORT_MS), barrier()),
            (barrier(), barrier(timeout_ms=SHORT_MS)),
        ),
        rare={"crash": 1, "report": 1, "leave": 1, "cancel": 1},
    ),
    Configuration(
        "agreement",
        "two positions: all ask, or go ahead and are asked; what they do is the same at the first one only",
        programs=(
            (agree(0, 7, timeout_ms=SHORT_MS), agree(1, 8)),
            (Launch("g", 0, 7), Launch("g", 1, 9)),
            (Launch("g", 0, 7), agree(1, 8, timeout_ms=SHORT_MS)),
        ),
        rare={"crash": 1, "leave": 1, "cancel": 1},
    ),
    Configuration(
        "unique id",
        "the root hands the id in early or late, or never; one rank's patience is short",
        programs=((put_id(0), barrier()), (get_id(0, timeout_ms=SHORT_MS), get_id(0)), (get_id(0), barrier())),
        rare={"crash": 1, "report": 1, "leave": 2, "cancel": 1},
    ),
    Configuration(
        "keys",
        "reads that wait, counters, deletions, and a name that all are done with",
        programs=(
            (set_key("k", b"1"), add("k"), forget("k")),
            (get_key("k", timeout_ms=SHORT_MS), delete("k"), forget("k")),
            (get_key("k"), add("n"), forget("k")),
        ),
        rare={"crash": 1, "leave": 2, "cancel": 1},
    ),
    Configuration(
        "silence",
        "ranks stop, or vanish without the end of their stream; one may go on, and be heard of again",
        programs=((barrier(),), (barrier(),), (barrier(),)),
        listens=True,
        rare={"stop": 1, "vanish": 1, "resume": 1, "beat": 2, "late": 1},
    ),
    Configuration(
        "absence",
        "two ranks wait in a collective to which the third does not come, and say so; or it stops before it answers",
        programs=((waiting(1), absent(1)), (waiting(1), absent(1, missing=(2,))), ()),
        listens=True,
        rare={"stop": 1, "crash": 1, "leave": 1},
    ),
    Configuration(
        "frames of two",
        "two ranks over real frames: each arrives in its own time; one is lost, repeated, or overtaken by the next",
        programs=((barrier(), set_key("k", b"1")), (barrier(timeout_ms=SHORT_MS), get_key("k"))),
        has_frames=True,
        rare={"tamper": 1, "crash": 1, "leave": 1, "cancel": 1},
    ),
    Configuration(
        "frames of three",
        "three ranks over real frames, one of which is lost, repeated, or overtaken by the next",
        programs=((barrier(),), (barrier(),), (barrier(timeout_ms=SHORT_MS),)),
        has_frames=True,
        rare={"tamper": 1, "crash": 1},
    ),
)
