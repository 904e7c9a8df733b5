"""What of a traceback is shown: the user's own lines, and gradsync's only where they may be at fault."""

import os

import command

import gradsync

PACKAGE = os.path.dirname(gradsync.__file__)


def traceback_of(tmp_path, source):
    script = command.write_script(tmp_path, source)
    code, _, err = command.run("run", "-n", 1, script)
    assert code == 1
    lines = err.splitlines()
    frames = [line.strip() for line in lines if line.startswith("  File ")]
    return [frame.replace(script, "script.py") for frame in frames], lines[-1]


def test_an_error_in_a_context_of_gradsync_points_at_the_block(tmp_path):
    source = """
        import numpy as np
        import gradsync as gs
        with gs.init_process_group():
            sync = gs.AllreduceCallback("mean")
            with sync.backward():
                sync("weights", np.ones(3))
                sync("weights", "no array")
        """
    frames, _ = traceback_of(tmp_path, source)
    assert frames == ['File "script.py", line 8, in <module>']


def test_the_users_code_below_gradsyncs_is_shown_with_all_between(tmp_path):
    source = """
        import gradsync as gs
        class Shapes:
            def __iter__(self):
                raise gs.GradsyncError("mine")
        gs.get_offsets(Shapes())
        """
    frames, _ = traceback_of(tmp_path, source)
    assert [frames[0], frames[-1]] == ['File "script.py", line 6, in <module>', 'File "script.py", line 5, in __iter__']
    assert len(frames) > 2
    assert all(PACKAGE in frame for frame in frames[1:-1])


def test_an_error_that_gradsync_did_not_foresee_keeps_all_frames(tmp_path):
    source = """
        import gradsync as gs
        from gradsync.bucketing import lists
        del lists.prod
        gs.get_offsets([(2, 3)])
        """
    frames, last = traceback_of(tmp_path, source)
    assert PACKAGE in frames[-1]
    assert last.startswith("NameError")
