"""A launcher whose output nobody takes still hears signals, and ends its ranks."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import command

FLOOD = """
    import sys
    while True:
        sys.stderr.write("x" * 1000 + "\\n")
"""
FINISHED = """
    import os, sys
    open(sys.argv[2], "w").close()  # waits until somebody opens it to read
    os.write(1, b"x" * 60_000 + b"\\n")
    sys.exit(int(sys.argv[1]))
"""


@contextlib.contextmanager
def unread_pipe():
    reader, writer = os.pipe()
    try:
        yield reader, writer
    finally:
        os.close(reader)
        os.close(writer)


def fill(writer):
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, b"." * 4096)
    os.set_blocking(writer, True)


def start(writer, *arguments):
    return command.Launcher(
        [sys.executable, "-c", command._START, "run", "--grace", "1", *map(str, arguments)],
        stdout=writer,
        stderr=writer,
        stdin=subprocess.DEVNULL,
    )


def test_signal_ends_a_flood_that_nobody_reads(tmp_path):
    script = command.write_script(tmp_path, FLOOD)
    with unread_pipe() as (reader, writer), start(writer, "-n", 2, script) as process:
        os.read(reader, 1)  # the flood has begun
        wait_until_full(writer)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 128 + signal.SIGTERM


def wait_until_full(writer):
    deadline = time.monotonic() + 30
    copy = os.dup(writer)
    try:
        import select

        poll = select.poll()
        poll.register(copy, select.POLLOUT)
        while poll.poll(0) and time.monotonic() < deadline:
            os.sched_yield()
    finally:
        os.close(copy)


def test_signal_while_the_last_output_waits_ends_the_job_and_counts(tmp_path):
    script, fifo = command.write_script(tmp_path, FINISHED), tmp_path / "fifo"
    os.mkfifo(fifo)
    with unread_pipe() as (_, writer):
        fill(writer)
        with start(writer, "-n", 1, "--max-restarts", 3, script, 3, fifo) as process:
            fifo.read_text()  # waits until the rank is there
            wait_until_childless(process.pid)
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 128 + signal.SIGTERM


def wait_until_childless(launcher):
    deadline = time.monotonic() + 30
    while Path(f"/proc/{launcher}/task/{launcher}/children").read_text():
        assert time.monotonic() < deadline
        os.sched_yield()


def test_restarts_do_not_need_a_reader(tmp_path):
    starts = tmp_path / "starts"
    script = command.write_script(tmp_path, f"open({str(starts)!r}, 'a').write('x'); raise SystemExit(9)")
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as gone:
        process = subprocess.run(
            [sys.executable, "-m", "gradsync", "run", "-n", "1", "--max-restarts", "2", script],
            stderr=gone,
            stdout=subprocess.DEVNULL,
        )
    assert process.returncode == 9
    assert starts.read_text() == "xxx"
