"""Whatever stands in a dump in place of what was written: it is read all the same, or refused by file and field."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gradsync as gs
from gradsync.cli import main
from gradsync.communicators.local import local_communicator
from gradsync.diagnostics.chrome_trace import chrome_trace
from gradsync.diagnostics.dump import read_dumps
from gradsync.diagnostics.report import report

pytestmark = pytest.mark.usefixtures("forgotten_recorders")

ABSENT = object()
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from([2**80, 10.0**300, "\ud800"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory, forgotten_recorders: None) -> Any:
    """A dump with all there can be: buckets, a plain collective, and a trace."""
    path = tmp_path_factory.mktemp("real") / "dump.json"
    with local_communicator() as comm, gs.trace(path):
        comm.broadcast(np.ones(2), root=0)
        sync = gs.AllreduceCallback("mean", comm)
        with sync.backward():
            sync("weights", np.ones(3))
            sync("bias", np.ones(1))
    content = json.loads(path.read_text())
    content["groups"] = {"local": content["groups"][comm.recorder.group]}
    content["phases"] = [[comm.recorder.group, 2, "packing", content["monotonic_seconds"], 2.0**30]]
    return content


def places(content: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """All places of a JSON value, by keys and indices from the top."""
    keys = content if isinstance(content, dict) else range(len(content)) if isinstance(content, list) else ()
    for key in keys:
        yield (*place, key)
        yield from places(content[key], (*place, key))


def altered(content: Any, place: tuple[Any, ...], value: Any) -> Any:
    """A copy with another value at a place, or without it."""
    copy = json.loads(json.dumps(content))
    within = copy
    for key in place[:-1]:
        within = within[key]
    if value is ABSENT:
        del within[place[-1]]
    else:
        within[place[-1]] = value
    return copy


def field_text(place: tuple[Any, ...]) -> str:
    return re.sub(r"\.(\[)", r"\1", ".".join(f"[{key}]" if isinstance(key, int) else key for key in place))


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_dump_is_read_or_refused(real: Any, tmp_path: Path, data: st.DataObject) -> None:
    place = data.draw(st.sampled_from(list(places(real))))
    path = tmp_path / "dump.json"
    path.write_text(json.dumps(altered(real, place, data.draw(st.just(ABSENT) | ANYTHING))))
    try:
        dump = read_dumps([path])[0][0]
    except gs.InvalidArgument as error:
        assert str(path) in str(error)
        assert place[0] in str(error)
        return
    "\n".join(report([dump], [dump])).encode()
    json.dumps(chrome_trace([dump, replace(dump, rank=1)]), allow_nan=False)


GROUP = ("groups", "local")
FIELDS = [
    ("pid",), ("rank",), ("wall_seconds",), ("stacks",), ("groups",), GROUP, (*GROUP, "ranks"), (*GROUP, "calls"),
    (*GROUP, "entries"), (*GROUP, "entries", 1), (*GROUP, "entries", 1, "began"), (*GROUP, "entries", 1, "state"),
    (*GROUP, "entries", 1, "call"), ("phases",), ("phases", 0), ("phases", 0, 3), ("steps", 0, 1),
]  # fmt: skip


@pytest.mark.parametrize("place", FIELDS, ids=field_text)
def test_the_field_is_named(real: Any, tmp_path: Path, place: tuple[Any, ...]) -> None:
    path = tmp_path / "dump.json"
    path.write_text(json.dumps(altered(real, place, -7.5)))
    with pytest.raises(gs.InvalidArgument, match=re.escape(f"{path} is damaged: {field_text(place)} needs to be ")):
        read_dumps([path])
    done = CliRunner().invoke(main, ["trace", str(path)])
    assert (done.exit_code, field_text(place) in done.output) == (2, True)


def test_a_field_that_is_not_there_is_named(real: Any, tmp_path: Path) -> None:
    path = tmp_path / "dump.json"
    path.write_text(json.dumps(altered(real, (*GROUP, "entries", 1, "ended"), ABSENT)))
    with pytest.raises(gs.InvalidArgument, match=r"groups\.local\.entries\[1\] has no field 'ended'"):
        read_dumps([path])


def test_a_name_that_is_no_utf_8_can_be_told(real: Any, tmp_path: Path) -> None:
    path = tmp_path / "dump.json"
    path.write_text(json.dumps(altered(real, ("stacks",), "MainThread:\n  train\udcff.py:1 in f")))
    done = CliRunner().invoke(main, ["trace", str(path)])
    assert (done.exit_code, r"train\udcff.py:1" in done.output) == (0, True)


def test_what_would_act_on_a_terminal_is_shown_as_an_escape(real: Any, tmp_path: Path) -> None:
    """In the report, and in the error about the place of a field."""
    path = tmp_path / "dump.json"
    for place, value, code in ((("reason",), "\x1b[2Jasked\r\n", 0), (("groups", "\x1b[2Jasked\r\n"), {}, 2)):
        path.write_text(json.dumps(altered(real, place, value)))
        done = CliRunner().invoke(main, ["trace", str(path)])
        assert (done.exit_code, r"\x1b[2Jasked\r\n" in done.output) == (code, True)
