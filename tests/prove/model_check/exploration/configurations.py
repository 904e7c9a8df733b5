"""What is explored: each configuration has the ranks do one kind of thing, with every order of mishaps around it."""

from __future__ import annotations

from exploration.configuration import Configuration
from exploration.steps import (
    ID,
    absent,
    barrier,
    delete,
    exchange,
    get_key,
    leave,
    left_ranks,
    set_key,
    waiting,
)

CONFIGURATIONS = (
    Configuration(
        "meeting",
        "three ranks join with deadlines of their own, give up, leave, die and come again, in up to two attempts",
        programs=((), (), ()),
        attempts=2,
        is_formed=False,
        rare={"crash": 1, "leave": 1, "cancel": 2},
    ),
    Configuration(
        "host",
        "the rank that hosts the server joins for a shorter time than the others: with it nobody waits any longer",
        programs=((), (), ()),
        attempts=2,
        is_formed=False,
        host=0,
        rare={"crash": 1, "leave": 1, "cancel": 2},
    ),
    Configuration(
        "older generation",
        "connections are lost while their ranks live on and join again; others pose as ranks that are there",
        programs=((), (), ()),
        attempts=2,
        is_formed=False,
        rare={"reset": 2, "impostor": 1},
    ),
    Configuration(
        "barrier",
        "two rounds of a barrier, with deadlines that end one before the other",
        programs=((barrier(), barrier()), (barrier(), barrier()), (barrier(), barrier())),
        rare={"crash": 1, "leave": 1, "cancel": 2},
    ),
    Configuration(
        "barrier given up",
        "a barrier of all beside one of two, waits that are given up, and a rank that reports its own failure",
        programs=(
            (barrier(),),
            (barrier("pair", ranks=(1, 2)), barrier()),
            (barrier("pair", ranks=(1, 2)),),
        ),
        rare={"cancel": 1, "report": 1},
    ),
    Configuration(
        "unique id",
        "the root hands the id in early or late, or never; one rank's patience is short",
        programs=((set_key("id", ID),), (get_key("id", 0), get_key("id", 0)), (get_key("id", 0),)),
        rare={"crash": 1, "report": 1, "leave": 1, "cancel": 1},
    ),
    Configuration(
        "keys",
        "reads that wait, a second value, deletions, and a name that all have left",
        programs=(
            (set_key("k", b"1"), set_key("k", b"2"), leave("k")),
            (get_key("k"), delete("k"), leave("k")),
            (get_key("k"), left_ranks("k"), leave("k")),
        ),
        rare={"crash": 1, "leave": 1},
    ),
    Configuration(
        "exchange",
        "values of all, beside a barrier of the same name; a rank gives up, leaves or dies",
        programs=((exchange(b"0"),), (exchange(b"1"), exchange(b"3")), (barrier("x"), exchange(b"2"))),
        rare={"crash": 1, "leave": 1, "cancel": 2},
    ),
    Configuration(
        "silence of two",
        "a rank stops or vanishes, its stream does not end; it may go on and be heard of again; the server stops, too",
        programs=((barrier(),), ()),
        listens=True,
        rare={"stop": 1, "vanish": 1, "resume": 1, "beat": 1, "late": 1},
    ),
    Configuration(
        "silence of three",
        "one of three ranks stops for good, or vanishes, while the others wait, or say that they live",
        programs=((barrier(),), (), ()),
        listens=True,
        rare={"stop": 1, "vanish": 1},
    ),
    Configuration(
        "absence",
        "two ranks wait in a collective to which the third does not come, and say so; or it dies before it answers",
        programs=((waiting(1), absent(1)), (absent(1, missing=(2,)),), ()),
        rare={"crash": 1},
    ),
    Configuration(
        "absence of a stopped rank",
        "a rank waits in a collective to which the other does not come: it may stop before it answers, or after",
        programs=((waiting(1), absent(1)), ()),
        listens=True,
        rare={"stop": 1, "leave": 1, "late": 1},
    ),
    Configuration(
        "frames of two",
        "two ranks over real frames: each arrives in its own time; one is lost, repeated, or overtaken by the next",
        programs=((barrier(), set_key("k", b"1")), (barrier(), get_key("k"))),
        has_frames=True,
        rare={"tamper": 1, "crash": 1, "cancel": 1},
    ),
    Configuration(
        "frames of three",
        "three ranks over real frames, one of which is lost, repeated, or overtaken by the next",
        programs=((barrier(),), (barrier(),), ()),
        has_frames=True,
        rare={"tamper": 1},
    ),
)
