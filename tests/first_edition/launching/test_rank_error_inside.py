"""What of a traceback is shown: the user's own lines, and gradsync's only where they may be at fault."""

import json
import os

import command
import pytest

import gradsync as gs
from gradsync.launching.in_rank.rank_main import report_error
from gradsync.launching.in_rank.result import ERROR
from gradsync.launching.rank_report import FrameReader


def traceback_of(tmp_path, source):
    script = command.write_script(tmp_path, source)
    code, _, err = command.run("run", "-n", 1, script)
    assert code == 1
    lines = err.splitlines()
    frames = [line.strip() for line in lines if line.startswith("  File ")]
    return [frame.replace(script, "script.py") for frame in frames], lines[-1]


@pytest.mark.parametrize("statement", ["gs.get_communicator()", "raise gs.GradsyncError('mine')"])
def test_where_gradsync_refuses_something_only_the_users_lines_are_shown(tmp_path, statement):
    source = f"""
        import gradsync as gs
        def step():
            {statement}
        step()
        """
    frames, last = traceback_of(tmp_path, source)
    assert frames == ['File "script.py", line 5, in <module>', 'File "script.py", line 4, in step']
    assert last.startswith("gradsync.errors.")


@pytest.mark.parametrize(
    ("verdict", "is_of_silence"),
    [
        (gs.RankFailed("rank 1 was stopped", rank=1, was_silent=True), True),
        (gs.CollectiveTimeout("rank 1 did not come", missing_ranks=(1,)), True),
        (gs.RankFailed("rank 1 died", rank=1), False),
    ],
)
def test_the_launcher_is_told_whether_the_rank_that_is_missed_may_still_tell_why(verdict, is_of_silence):
    own = ValueError("no gradients")
    own.__cause__ = verdict
    reader, writer = os.pipe()
    report_error(writer, own)
    os.close(writer)
    [(kind, body)] = FrameReader(reader).read(None)
    os.close(reader)
    told = json.loads(body)
    assert (kind, told["is_consequence"], told["missed_rank"], told["is_of_silence"]) == (ERROR, True, 1, is_of_silence)
