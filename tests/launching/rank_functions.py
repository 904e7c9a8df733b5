"""Functions that ranks run; apart from the tests, so that a rank need not import pytest."""

import os
import signal
import sys
import threading

import gradsync as gs


def place(*arguments):
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {name: os.environ[name] for name in names}, arguments


def environment():
    return dict(os.environ)


def raise_on_rank_1():
    if os.environ["RANK"] == "1":
        raise ValueError("boom")
    wait_for_signal()


def wait_for_signal():
    while True:
        signal.pause()


def raise_consequence_then_cause(error_name, fifo):
    """Rank 0 fails only because rank 1 does, but is the first to say so."""
    if os.environ["RANK"] == "0":
        with open(fifo):  # waits until rank 1 is there
            raise getattr(gs, error_name)("rank 1 is gone")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # however late it is on a busy machine
    with open(fifo, "w"):
        threading.Event().wait(0.3)
    raise ZeroDivisionError("the cause")


class Stubborn(Exception):
    """Pickles, and cannot be rebuilt."""

    def __init__(self, first, second):
        super().__init__(first)


def raise_stubborn():
    raise Stubborn(1, 2)


def return_unpicklable_on_rank_1():
    return (lambda: 0) if os.environ["RANK"] == "1" else 0


def return_bytes(size):
    return bytes([int(os.environ["RANK"])]) * size


def kill_rank_1():
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    wait_for_signal()


def leave_thread_running_after_error():
    threading.Thread(target=threading.Event().wait).start()
    raise ValueError("with a thread")


def exit_with(code):
    sys.exit(code)


def put(queue):
    queue.put(int(os.environ["RANK"]))


@gs.launcher(n_gpus=2)
def rank_in_group(offset, *, factor=1):
    return (gs.get_communicator().rank + offset) * factor


@gs.launcher(n_gpus=2)
def fail_in_group():
    if gs.get_communicator().rank == 1:
        raise ValueError("boom")
    gs.get_communicator().barrier()


@gs.launcher(n_gpus=2)
def exit_3():
    sys.exit(3)


def plain(value):
    return value, gs.is_initialized()


wrapped_elsewhere = gs.launcher(n_gpus=1)(plain)
