"""The queue of asynchronous collectives: order, threads, ends; without other ranks. With them: test_asynchronous.py."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import gradsync as gs
from gradsync.communicators import collective_queue
from gradsync.communicators.local import local_communicator
from gradsync.futures import pending

WAIT = 20.0


@pytest.fixture
def comm() -> Iterator[gs.Communicator]:
    with local_communicator() as communicator:
        yield communicator
    assert not pending


def submit(comm: Any, run: Callable[[], Any]) -> gs.CollectiveFuture:
    return collective_queue.submit(comm._lifetime, "a test", run)


LOST = "a test failed, and its future was never asked for the result: RankFailed: rank 1 died"


def test_a_failure_that_nobody_asks_for_is_logged_at_the_end_of_the_program() -> None:
    done, _ = run_to_the_end(
        IMPORTS
        + """
    def fail():
        raise gs.RankFailed("rank 1 died")
    future = submit(comm._lifetime, "a test", fail)
    limit = time.monotonic() + 20
    while not future.done() and time.monotonic() < limit:  # to look is not to ask why it failed
        time.sleep(0.01)
    """
    )
    assert (done.returncode, done.stderr.count(LOST)) == (0, 1)


def test_a_failure_that_nobody_asks_for_is_logged_as_its_future_is_deleted(
    comm: gs.Communicator, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise gs.RankFailed("rank 1 died")

    gc.disable()  # the error's traceback must not keep the future's parts alive until the next collection
    try:
        future = submit(comm, fail)
        while pending:
            time.sleep(0.01)
        assert caplog.messages == []
        del future
        limit = time.monotonic() + WAIT
        while not caplog.messages and time.monotonic() < limit:
            time.sleep(0.01)
        assert [LOST in message for message in caplog.messages] == [True]
    finally:
        gc.enable()


def test_a_logging_handler_may_run_a_collective(comm: gs.Communicator) -> None:
    """It holds its lock while it waits for the queue, which has a failure to log."""
    begin, ended = threading.Event(), threading.Event()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.msg == "wait":
                begin.set()
                comm.barrier()
                ended.set()

    def fail() -> None:
        begin.wait(WAIT)
        time.sleep(0.1)
        raise ValueError("a wrong value")

    handler = Handler()
    logging.getLogger("gradsync").addHandler(handler)
    try:
        submit(comm, fail)  # its future is deleted at once
        thread = threading.Thread(target=lambda: logging.getLogger("gradsync").error("wait"), daemon=True)
        thread.start()
        assert ended.wait(WAIT)
    finally:
        logging.getLogger("gradsync").removeHandler(handler)


def run_to_the_end(script: str) -> tuple[subprocess.CompletedProcess[str], float]:
    """Runs a script; returns also the seconds from its last statement to its end."""
    script = textwrap.dedent(script) + "\nprint(time.time(), flush=True)\n"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    return done, time.time() - float(done.stdout.split()[-1])


IMPORTS = """
    import threading, time
    import gradsync as gs
    from gradsync.communicators.collective_queue import submit
    comm = gs.init_process_group("local")
"""


def test_the_end_of_the_program_waits_a_moment_for_what_is_under_way() -> None:
    done, _ = run_to_the_end(
        IMPORTS
        + """
    import sys
    from gradsync.communicators import collective_queue
    collective_queue._LEAVING_SECONDS = 20.0
    stop = threading.Event()
    future = submit(comm._lifetime, "a test", lambda: stop.wait(20))
    threading.Timer(0.2, stop.set).start()
    future.add_done_callback(lambda future: print("done", future.result(), file=sys.stderr))
    """
    )
    assert (done.returncode, done.stderr) == (0, "done True\n")


def test_the_end_of_the_program_does_not_wait_for_what_never_ends() -> None:
    done, seconds = run_to_the_end(
        IMPORTS
        + """
    futures = [submit(comm._lifetime, "a test", threading.Event().wait) for _ in range(3)]
    """
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert seconds < WAIT


def test_the_child_of_a_fork_gets_an_error_from_what_its_parent_submitted() -> None:
    done, _ = run_to_the_end(
        IMPORTS
        + """
    import os, warnings
    warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads
    future = submit(comm._lifetime, "a test", threading.Event().wait)
    child = os.fork()
    if child == 0:
        try:
            future.result(20)
        except gs.CommunicatorClosed as error:
            os._exit(7 if "was submitted by the parent process of this forked process" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    """
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_after_an_exception_the_program_does_not_wait_at_all() -> None:
    script = textwrap.dedent(IMPORTS) + textwrap.dedent("""
        future = submit(comm._lifetime, "a test", threading.Event().wait)
        print(time.time(), flush=True)
        raise ValueError("the news")
    """)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.endswith("ValueError: the news\n")
    assert time.time() - float(done.stdout) < WAIT
