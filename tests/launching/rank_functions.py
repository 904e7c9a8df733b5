"""Functions that ranks run; apart from the tests, so that a rank need not import pytest.

What only one of them needs it imports itself: NumPy and Click take longer than all else that a rank does here.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import gradsync as gs

is_in_a_test = False  # a test sets it, and only copies of its process see that


def place(*arguments):
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {name: os.environ[name] for name in names}, arguments


def launch_again():
    try:
        gs.launch(place, (), 2)
    except gs.InvalidArgument as error:
        return str(error)
    return "launched"


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
    import command

    if os.environ["RANK"] == "0":
        with open(fifo, "w") as file:  # waits until rank 1 is there
            file.write(str(os.getpid()))
        raise getattr(gs, error_name)("rank 1 is gone")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # however late it is on a busy machine
    command.has_ended(int(Path(fifo).read_text()), None)
    raise ZeroDivisionError("the cause")


def raise_on_every_rank():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a rank may be late on a busy machine
    with gs.init_process_group("shm") as communicator:
        communicator.barrier()  # neither rank's error comes before the other rank ignores SIGTERM
    raise ValueError("on every rank")


class Stubborn(Exception):
    """Pickles, and cannot be rebuilt."""

    def __init__(self, first, second):
        super().__init__(first)


def raise_stubborn():
    raise Stubborn(1, 2)


def work_on_beside_an_unpicklable_result(path):
    """On rank 0, returns whether it was asked to end in the second after rank 1 had."""
    if os.environ["RANK"] == "1":
        with open(path, "w") as fifo:
            fifo.write(str(os.getpid()))
        return threading.Lock()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    with open(path) as fifo:
        pid = int(fifo.read())
    while True:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return signal.sigtimedwait({signal.SIGTERM}, 1.0) is not None
        time.sleep(0.01)


def join_beside_an_unpicklable_result():
    if os.environ["RANK"] == "1":
        return threading.Lock()
    return gs.init_process_group("shm").rank


def return_unpicklable_on_rank_1():
    return threading.Lock() if os.environ["RANK"] == "1" else 0


def kill_rank_1():
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    wait_for_signal()


def leave_thread_running_after_error():
    threading.Thread(target=threading.Event().wait).start()
    raise ValueError("with a thread")


def size_and_local_size():
    return gs.get_communicator().world_size, os.environ["LOCAL_WORLD_SIZE"]


def address():
    return os.environ["GRADSYNC_ADDRESS"]


def address_and_secrets():
    names = [name for name in os.environ if "SECRET" in name]
    return os.environ["GRADSYNC_ADDRESS"], os.environ["MASTER_ADDR"], names


def backend(gpus=0):
    """Gives the backend of a process group, on a machine that seems to have so many GPUs."""
    from gradsync import backend_choice

    backend_choice.count_gpus = lambda: gpus
    with gs.init_process_group() as communicator:
        communicator.barrier()  # the stand-in's ranks end together
        return communicator.backend


def backend_of_own_group():
    with gs.init_process_group() as communicator:
        return communicator.backend


def backend_of_group():
    communicator = gs.get_communicator()
    communicator.barrier()
    return communicator.backend


def fail_beside_a_rank_that_waits(path):
    """Rank 0 waits for nothing but a signal when rank 1 fails."""
    if gs.get_communicator().rank == 0:
        Path(path).write_text(str(os.getpid()))
    gs.get_communicator().barrier()
    if gs.get_communicator().rank == 1:
        raise ValueError("boom")
    wait_for_signal()


def exit_with(code):
    sys.exit(code)


def return_on_rank_0(queue):
    """Rank 0 returns, and only when it has ended, rank 1 fails."""
    if os.environ["RANK"] == "0":
        queue.put(os.getpid())
        queue.close()
        queue.join_thread()
        return "kept"
    with contextlib.suppress(ProcessLookupError):  # ended already
        select.select([os.pidfd_open(queue.get())], [], [])
    raise ValueError("boom")


def read_and_return(path):
    with open(path) as file:
        return file.read(), os.getpid()


def read_on_rank_1(path):
    return read_and_return(path)[0] if os.environ["RANK"] == "1" else "first"


def return_stubborn():
    return Stubborn(1, 2)


def interrupt_oneself():
    raise KeyboardInterrupt


def start_grandchild_and_fail(queue):
    """The grandchild leaves its family, as a daemon does."""
    if os.environ["RANK"] == "0":
        program = [sys.executable, "-c", "import os, signal, sys; print(os.getpid(), flush=True); signal.pause()"]
        grandchild = subprocess.Popen(program, stdout=subprocess.PIPE, start_new_session=True)
        queue.put(int(grandchild.stdout.readline()))
        raise ValueError("boom")
    wait_for_signal()


def start_method():
    """Tells how this rank came to life."""
    return "fork" if is_in_a_test else "spawn"


def start_method_and_rank(queue, lock):
    """Tells the rank through multiprocessing's own objects, too."""
    with lock:
        queue.put(int(os.environ["RANK"]))
    return start_method(), int(os.environ["RANK"])


def put(queue):
    queue.put(int(os.environ["RANK"]))


def place_in_group(*_):
    with gs.init_process_group() as communicator:
        return communicator.rank, communicator.world_size


def rank_of_group():
    return gs.get_communicator().rank


@gs.launcher(n_gpus=2)
def rank_in_group(offset, *, factor=1):
    return (gs.get_communicator().rank + offset) * factor


@gs.launcher
def bare():
    return gs.get_communicator().world_size


@gs.launcher(n_gpus=2)
def exit_0_on_rank_1():
    if gs.get_communicator().rank == 1:
        os._exit(0)
    return "returned"


@gs.launcher(n_gpus=2)
def large_in_group(size):
    return bytes(size)


def plain(value):
    return value, gs.is_initialized()


def return_arrays():
    """Large and small, of every layout, and two that share memory by being one."""
    import numpy as np

    values = np.arange(200_000.0).reshape(400, 500)
    fixed = values * 2
    fixed.flags.writeable = False
    return {
        "C": values,
        "Fortran": np.asfortranarray(values),
        "small and Fortran": np.asfortranarray(values[:40]),
        "strided": values[::2, ::3],
        "read-only": fixed,
        "small": values[0, :7].copy(),
        "again": values,
        "bytes": bytes(range(256)) * 10_000,
        "nested": [[float(i) for i in range(500)] for _ in range(200)],
    }


def return_array_where_files_must_be_small(hard_limit_bytes=-1):
    import resource

    import numpy as np

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, hard_limit_bytes))
    return np.arange(500_000.0)


class KillsOnPickling:
    """Ends its process when it is pickled, between the arrays before and behind it."""

    def __reduce__(self):
        os.kill(os.getpid(), signal.SIGKILL)


def die_while_returning():
    import numpy as np

    if os.environ["RANK"] == "1":
        return [np.ones(500_000), KillsOnPickling(), np.ones(500_000)]
    return np.full(500_000, 3.0)


def return_arrays_and_lambda():
    import numpy as np

    return np.arange(100_000.0), lambda: 5, np.arange(100_000.0) * 2
