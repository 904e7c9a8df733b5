"""One rank's process, as the launcher sees it: what a start that fails leaves."""

import os
import resource

import pytest
import rank_functions

from gradsync.launching.function_call import function_target
from gradsync.launching.rank_process import RankProcess


def test_no_open_files_left_leaves_none_open():
    target = function_target(rank_functions.place, (), {}, who="test")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = sorted(os.listdir("/proc/self/fd"))
    null = os.open(os.devnull, os.O_RDWR)
    for room in range(8):  # that many descriptors take the pipes and the result file
        resource.setrlimit(resource.RLIMIT_NOFILE, (null + 1 + room, limits[1]))
        try:
            with pytest.raises(OSError, match="Too many open files"):
                RankProcess(0, 0).start("spawn", target, null, {}, (null, null, null))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    os.close(null)
    assert sorted(os.listdir("/proc/self/fd")) == before
