"""The forwarder with real pipes and terminals: what a person sees of ranks that print."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import select
import subprocess
import sys
import termios
import threading
import time
import tty
import weakref
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contract import wait_until
from gradsync.errors import InvalidArgument
from gradsync.launching import output as output_module
from gradsync.launching.output import OutputForwarder, prepare_log_directory


def has_ended(forwarder, rank, timeout):
    """Returns whether all that a rank printed has been read within so many seconds."""
    deadline = time.monotonic() + timeout
    while any(stream.rank == rank for writer in forwarder._writers for stream in writer._streams):
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.001)
    return True


class Capture:
    """A stream into a file in memory, whose text a test reads."""

    def __init__(self):
        self._descriptor = os.memfd_create("capture")
        weakref.finalize(self, os.close, self._descriptor)

    def fileno(self):
        return self._descriptor

    def flush(self):
        pass

    def getvalue(self):
        return os.pread(self._descriptor, 1 << 20, 0).decode()


class Ranks:
    """A forwarder of output, and the write ends of its ranks' output."""

    def __init__(self, count, stdout=None, stderr=None, *, prefix=True, started=True, **options):
        self.stdout, self.stderr = stdout or Capture(), stderr or Capture()
        self.before = set(os.listdir("/proc/self/fd"))
        self.forwarder = OutputForwarder(self.stdout, self.stderr, prefix=prefix, **options)
        self.writers = {}
        for rank in range(count):
            self.add(rank)
        if started:
            self.forwarder.start()

    def add(self, rank):
        readers, writers = zip(os.pipe(), os.pipe(), strict=True)
        self.forwarder.add(rank, *readers)
        self.writers[rank] = list(writers)

    def write(self, rank, data, stream=1):
        os.write(self.writers[rank][stream - 1], data)

    def end(self, rank):
        for descriptor in self.writers.pop(rank):
            os.close(descriptor)
        assert has_ended(self.forwarder, rank, 20)

    def close(self, timeout=20):
        for rank in list(self.writers):
            self.end(rank)
        return self.forwarder.finish(timeout)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for descriptors in self.writers.values():
            for descriptor in descriptors:
                os.close(descriptor)
        self.forwarder.finish(1)


@contextlib.contextmanager
def pipe_stream():
    """Gives the read end of a pipe and a text stream into it."""
    reader, writer = os.pipe()
    with open(writer, "w", encoding="utf-8") as stream:
        yield reader, stream
    with contextlib.suppress(OSError):
        os.close(reader)


def read_all(reader, stream):
    """Reads what a closed forwarder left in a pipe of less than its size."""
    stream.close()
    return b"".join(iter(lambda: os.read(reader, 65536), b""))


def read_until(reader, pattern):
    """Reads from a pipe or terminal until the pattern is in it."""
    data = b""
    while not re.search(pattern, data, re.DOTALL):
        assert select.select([reader], [], [], 20)[0], f"{pattern!r} did not come, but {data!r}"
        data += os.read(reader, 65536)
    return data


def unread_bytes(pipe):
    return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)


@contextlib.contextmanager
def terminal():
    """Gives both ends of a terminal that passes bytes as they are."""
    master, slave = os.openpty()
    tty.setraw(slave)
    with open(slave, "w", encoding="utf-8") as stream:
        yield master, stream
    os.close(master)


@contextlib.contextmanager
def patient_forwarder():
    """Has the forwarder wait for the end of each line, however late the test's next words come."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(output_module, "_PARTIAL_LINE_SECONDS", 3600.0)
        yield


def write_until_closed(ranks, rank):
    with contextlib.suppress(BrokenPipeError):
        ranks.write(rank, b"x\n" * (1 << 20))


def test_lines_of_two_ranks_are_never_mixed():
    with patient_forwarder(), pipe_stream() as (reader, stdout), Ranks(2, stdout) as ranks:
        ranks.write(0, b"he")
        ranks.write(1, b"good bye\n")
        assert read_until(reader, rb"\n") == b"[rank 1] good bye\n"
        ranks.write(0, b"llo\nand more\n")
        assert read_until(reader, rb"more\n") == b"[rank 0] hello\n[rank 0] and more\n"


def test_streams_stay_apart():
    ranks = Ranks(1)
    ranks.write(0, b"out\n", 1)
    ranks.write(0, b"err\n", 2)
    assert ranks.close()
    assert ranks.stdout.getvalue() == "[rank 0] out\n"
    assert ranks.stderr.getvalue() == "[rank 0] err\n"


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 2),
            st.lists(st.sampled_from([b"a", b"bc ", b"\n", b"\r\n", "é".encode(), b"\xff"]), min_size=1).map(b"".join),
        )
    )
)
def test_nothing_is_lost_and_nothing_doubled(chunks):
    with patient_forwarder(), pipe_stream() as (reader, stdout):
        ranks = Ranks(3, stdout)
        for rank, chunk in chunks:
            ranks.write(rank, chunk)
        assert ranks.close()
        printed = read_all(reader, stdout)
    for rank in range(3):
        lines = re.findall(rb"^\[rank %d\] (.*\n)" % rank, printed, re.MULTILINE)
        expected = b"".join(chunk for number, chunk in chunks if number == rank)
        if expected and not expected.endswith(b"\n"):
            expected += b"\n"
        assert b"".join(lines) == expected
    assert all(line.startswith(b"[rank ") for line in printed.splitlines())


def test_of_a_progress_bar_the_last_state_of_each_line_is_shown():
    with pipe_stream() as (reader, stdout):
        ranks = Ranks(1, stdout)
        ranks.write(0, b"10%\r20%\rdone\r\nnext\n\r 1%\r 2%\n")
        assert ranks.close()
        assert read_all(reader, stdout) == b"[rank 0] done\r\n[rank 0] next\n[rank 0]  2%\n"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_the_states_of_progress_bars_are_lines(is_terminal):
    with terminal() if is_terminal else pipe_stream() as (reader, stdout), Ranks(2, stdout) as ranks:
        ranks.write(0, b"\r  0%")  # as tqdm draws
        assert read_until(reader, rb"0%\n") == b"[rank 0]   0%\n"
        ranks.write(1, b"  0%\r")
        assert read_until(reader, rb"0%\n") == b"[rank 1]   0%\n"
        ranks.write(0, b"\r 50%")
        assert read_until(reader, rb"50%\n") == b"[rank 0]  50%\n"
        ranks.write(0, b"\r100%\n")
        assert read_until(reader, rb"100%\n") == b"[rank 0] 100%\n"
        ranks.write(1, b"100%\r\nhello\n")
        assert read_until(reader, rb"hello\n").replace(b"\r", b"") == b"[rank 1] 100%\n[rank 1] hello\n"


def test_of_a_fast_progress_bar_few_states_are_shown():
    with pipe_stream() as (reader, stdout):
        ranks = Ranks(1, stdout)
        for state in range(200):
            ranks.write(0, b"\r%d/200" % state)
            time.sleep(0.01)
        ranks.write(0, b"\r200/200\n")
        assert ranks.close()
        lines = read_all(reader, stdout).splitlines()
    assert 2 <= len(lines) <= 10  # about 3 on an idle machine
    assert lines[-1] == b"[rank 0] 200/200"


def test_a_state_without_return_is_followed_by_the_next():
    with pipe_stream() as (reader, stdout), Ranks(1, stdout) as ranks:
        ranks.write(0, b"10%")
        assert read_until(reader, rb"10%") == b"[rank 0] 10%"
        ranks.write(0, b"\r20%")
        assert read_until(reader, rb"20%\n") == b"\n[rank 0] 20%\n"


@pytest.mark.parametrize(
    ("states", "shown"),
    [
        ((b"50%\r", b"100%\r"), b"[rank 0] 50%\n[rank 0] 100%\n"),
        ((b"50%\r", b"100%\r", b"\r\n"), b"[rank 0] 50%\n[rank 0] 100%\n"),
        ((b"\r50%", b" of all\n", b"\n"), b"[rank 0] 50%\n[rank 0] 50% of all\n[rank 0] \n"),
        ((b"\r50%", b"\r50%", b"\n50%\n"), b"[rank 0] 50%\n[rank 0] 50%\n"),
        ((b"10%", b"\r20%\n"), b"[rank 0] 10%\n[rank 0] 20%\n"),
        ((b"10%", b"\r"), b"[rank 0] 10%\n"),
        ((b"x\n", b"\r"), b"[rank 0] x\n"),
        ((b"\r50%", b"\r   \r"), b"[rank 0] 50%\n"),
        ((b"\r50%", b"\r\x1b[2K", b"done\n"), b"[rank 0] 50%\n[rank 0] done\n"),
    ],
)
def test_a_slow_progress_bar_leaves_neither_mixed_states_nor_a_bare_prefix(monkeypatch, states, shown):
    monkeypatch.setattr(output_module, "_PARTIAL_LINE_SECONDS", 0.0)  # each state is shown before the next is read
    monkeypatch.setattr(output_module, "_BAR_SECONDS", 0.0)
    with pipe_stream() as (reader, stdout):
        ranks = Ranks(1, stdout)
        for state in states:
            ranks.write(0, state)
            wait_until(lambda: not unread_bytes(ranks.writers[0][0]))
        ranks.close()
        assert read_all(reader, stdout) == shown


def test_prompt_is_shown_and_continued():
    with pipe_stream() as (reader, stdout), Ranks(1, stdout) as ranks:
        ranks.write(0, b"name? ")
        assert read_until(reader, rb"\? ") == b"[rank 0] name? "
        ranks.write(0, b"thanks\nbye\n")
        assert read_until(reader, rb"bye\n") == b"thanks\n[rank 0] bye\n"


def test_another_rank_begins_a_new_line_after_a_prompt():
    with pipe_stream() as (reader, stdout), Ranks(2, stdout) as ranks:
        ranks.write(0, b"(Pdb) ")
        read_until(reader, rb"\(Pdb\) ")
        ranks.write(1, b"hello\n")
        assert read_until(reader, rb"hello\n") == b"\n[rank 1] hello\n"
        ranks.write(0, b"later\n")
        assert read_until(reader, rb"later\n") == b"[rank 0] later\n"


def test_prompt_on_one_terminal_for_both_streams():
    with terminal() as (master, stdout), open(os.dup(stdout.fileno()), "w", encoding="utf-8") as stderr:
        ranks = Ranks(1, stdout, stderr)
        ranks.write(0, b"name? ", 1)
        read_until(master, rb"\? ")
        ranks.write(0, b"a warning\n", 2)
        assert read_until(master, rb"warning\n") == b"\n[rank 0] a warning\n"
        assert ranks.close()


def test_last_line_without_newline_gets_one_at_the_end_of_its_rank():
    with pipe_stream() as (reader, stdout), Ranks(2, stdout) as ranks:
        ranks.write(0, b"no newline")
        ranks.end(0)
        assert read_until(reader, rb"newline\n") == b"[rank 0] no newline\n"


def test_invalid_utf_8_passes_unharmed():
    data = bytes(set(range(256)) - {10, 13}) + b"\n"
    with pipe_stream() as (reader, stdout):
        ranks = Ranks(1, stdout)
        ranks.write(0, data)
        assert ranks.close()
        assert read_all(reader, stdout) == b"[rank 0] " + data


def test_without_prefix_bytes_pass_as_they_are():
    data = b"one\r\ntwo\rthree"
    with pipe_stream() as (reader, stdout):
        ranks = Ranks(1, stdout, prefix=False)
        ranks.write(0, data)
        assert ranks.close()
        assert read_all(reader, stdout) == data


def test_without_prefix_lines_are_not_mixed_either():
    with pipe_stream() as (reader, stdout), Ranks(2, stdout, prefix=False) as ranks:
        ranks.write(0, b"open")
        read_until(reader, rb"open")
        ranks.write(1, b"other\n")
        assert read_until(reader, rb"other\n") == b"\nother\n"


def test_without_prefix_a_rank_continues_its_own_line():
    with terminal() as (master, stdout), open(os.dup(stdout.fileno()), "w", encoding="utf-8") as stderr:
        ranks = Ranks(1, stdout, stderr, prefix=False)
        ranks.write(0, b"loading ", 1)
        read_until(master, b"loading ")
        ranks.write(0, b"a warning", 2)
        assert read_until(master, b"warning") == b"a warning"
        ranks.end(0)
        assert read_until(master, b"\n") == b"\n"  # on a terminal, what comes next begins a line
        assert ranks.close()


def test_endless_line_passes_in_pieces():
    with pipe_stream() as (reader, stdout), Ranks(1, stdout) as ranks:
        data = b"x" * (3 << 20)
        writing = threading.Thread(target=ranks.write, args=(0, data))  # os.write waits until all is taken
        writing.start()
        seen = 0
        while seen < len(data) // 2:  # no newline, and yet it comes
            seen += len(os.read(reader, 65536))
        while seen < len(data) + len(b"[rank 0] "):
            seen += len(os.read(reader, 65536))
        writing.join()


def test_tail_is_kept():
    with Ranks(1) as ranks:
        ranks.write(0, b"".join(b"line %d\n" % number for number in range(100)) + b"caf\xff")
        ranks.end(0)
        assert ranks.forwarder.tail(0) == [
            *(f"line {number}" for number in range(100)),
            "caf\N{REPLACEMENT CHARACTER}",
        ]


def test_blocked_terminal_keeps_nobody_from_ending():
    with terminal() as (_, stream), Ranks(1, stream) as ranks:
        os.set_blocking(ranks.writers[0][0], False)
        with pytest.raises(BlockingIOError):  # until nothing more fits anywhere
            while select.select([], [ranks.writers[0][0]], [], 1)[1]:
                ranks.write(0, b"x" * 4095 + b"\n")
            ranks.write(0, b"x")
        ranks.write(0, b"still seen\n", 2)
        began = time.monotonic()
        assert not has_ended(ranks.forwarder, 0, 0.1)
        ranks.forwarder.finish(0.2)
        assert time.monotonic() - began < 20
        assert ranks.forwarder.tail(0)[0].startswith("xxx")


def test_blocked_stdout_does_not_hold_up_stderr():
    with pipe_stream() as (out, stdout), pipe_stream() as (reader, stderr), Ranks(1, stdout, stderr) as ranks:
        writing = threading.Thread(target=write_until_closed, args=(ranks, 0))
        writing.start()
        ranks.write(0, b"help\n", 2)
        assert read_until(reader, rb"\n") == b"[rank 0] help\n"
        while select.select([], [stdout], [], 0)[1]:
            time.sleep(0.001)
        assert not ranks.forwarder.finish(0.1)  # its thread stands in a write
        while not ranks.forwarder.finish(0.01):
            if select.select([out], [], [], 0)[0]:
                os.read(out, 65536)
        writing.join()


def test_ranks_feel_that_the_reader_of_stdout_has_gone():
    with pipe_stream() as (reader, stdout), pipe_stream() as (errors, stderr), Ranks(2, stdout, stderr) as ranks:
        os.close(reader)
        ranks.write(0, b"x\n")
        with pytest.raises(BrokenPipeError):
            while select.select([], [ranks.writers[1][0]], [], 20)[1]:
                ranks.write(1, b"x\n")
        ranks.write(1, b"still heard\n", 2)
        told = b"gradsync: standard output cannot be written: its reader has gone\n"
        assert read_until(errors, rb"heard\n") == told + b"[rank 1] still heard\n"
        assert ranks.close()
        with contextlib.suppress(BrokenPipeError):
            stdout.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here, which is always full")
def test_it_is_told_once_why_standard_output_cannot_be_written():
    with open("/dev/full", "w") as stdout, Ranks(2, stdout) as ranks:
        for rank in range(2):
            write_until_closed(ranks, rank)
        assert ranks.close()
        told = "gradsync: standard output cannot be written: No space left on device\n"
        assert ranks.stderr.getvalue() == told


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here, which is always full")
@pytest.mark.parametrize("is_both", [False, True])
def test_of_a_lost_stderr_nothing_is_told(is_both):
    with open("/dev/full", "w") as stderr, Ranks(1, stderr if is_both else None, stderr) as ranks:
        ranks.write(0, b"x\n", 2)
        with pytest.raises(BrokenPipeError):
            while select.select([], [ranks.writers[0][1]], [], 20)[1]:
                ranks.write(0, b"x\n", 2)
        if not is_both:
            ranks.write(0, b"still heard\n")
        assert ranks.close()
        if not is_both:
            assert ranks.stdout.getvalue() == "[rank 0] still heard\n"


def test_streams_that_were_closed_at_the_start_take_everything():
    forwarder = OutputForwarder(None, None, prefix=True)
    readers, writers = zip(os.pipe(), os.pipe(), strict=True)
    forwarder.add(0, *readers)
    forwarder.start()
    for writer in writers:
        os.write(writer, b"x\n")
        os.close(writer)
    assert has_ended(forwarder, 0, 20)
    assert forwarder.tail(0) == ["x", "x"]
    assert forwarder.finish(20)


def test_end_of_a_rank_that_left_a_process_behind_is_not_awaited_for_ever():
    ranks = Ranks(1)
    ranks.write(0, b"last words\n")
    assert not has_ended(ranks.forwarder, 0, 0.05)  # the write ends are open still
    assert ranks.forwarder.finish(20)
    assert ranks.stdout.getvalue() == "[rank 0] last words\n"
    ranks.writers.clear()


def test_close_passes_on_all_that_is_in_the_pipes():
    with pipe_stream() as (reader, stdout), Ranks(1, stdout) as ranks:
        data = b"".join(b"line %d\n" % number for number in range(30_000))
        fcntl.fcntl(ranks.writers[0][0], fcntl.F_SETPIPE_SZ, 1 << 20)
        ranks.write(0, data)
        closing = threading.Thread(target=ranks.forwarder.finish, args=(20,))
        closing.start()
        printed = read_until(reader, rb"line 29999\n")
        closing.join()
        assert printed.replace(b"[rank 0] ", b"") == data


def test_close_without_start_passes_on_what_there_is():
    ranks = Ranks(1, started=False)
    ranks.write(0, b"x\n")
    assert ranks.forwarder.finish(20)
    assert ranks.forwarder.finish(20)
    assert ranks.stdout.getvalue() == "[rank 0] x\n"
    for descriptor in ranks.writers.pop(0):
        os.close(descriptor)


def test_nothing_is_left_open():
    ranks = Ranks(3)
    ranks.write(2, b"x\n")
    assert ranks.close()
    assert set(os.listdir("/proc/self/fd")) == ranks.before


def test_log_files_hold_the_bytes_of_both_streams(tmp_path):
    directory = tmp_path / "deep" / "logs"
    with pipe_stream() as (reader, stdout), Ranks(2, stdout, log_dir=str(directory)) as ranks:
        ranks.write(1, b"out \xff\r\n", 1)
        read_until(reader, rb"\n")
        ranks.write(1, b"err", 2)
        assert ranks.close()
    assert (directory / "rank-1.log").read_bytes() == b"out \xff\r\nerr"
    assert (directory / "rank-0.log").read_bytes() == b""


def test_logs_of_an_earlier_run_are_removed(tmp_path):
    for count in (3, 1):
        for restart in range(2):
            with Ranks(count, log_dir=str(tmp_path), restart=restart) as ranks:
                ranks.write(0, b"from a run of %d\n" % count)
                assert ranks.close()
    logs = [tmp_path / "rank-0.log", tmp_path / "rank-0.restart-1.log"]
    assert sorted(tmp_path.iterdir()) == logs
    assert all(log.read_bytes() == b"from a run of 1\n" for log in logs)


def test_what_is_no_log_stays_in_the_log_directory(tmp_path):
    kept = ["notes.txt", "rank-0.log.gz", "rank-0.restart-x.log", "old/rank-0.log", "rank-5.log/x"]
    for name in kept:
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text("mine")
    (tmp_path / "rank-3.log").symlink_to("notes.txt")
    with Ranks(0, log_dir=str(tmp_path)) as ranks:
        assert ranks.close()
    assert all((tmp_path / name).read_text() == "mine" for name in kept)
    assert (tmp_path / "rank-3.log").is_symlink()


def test_launchers_that_share_a_log_directory_leave_each_other_s_logs(tmp_path):
    for rank in range(4):
        (tmp_path / f"rank-{rank}.log").touch()
    prepare_log_directory(str(tmp_path), 0, {0, 2})  # rank 3: of a larger run before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank-0.log", "rank-2.log"]
    prepare_log_directory(str(tmp_path), 0, {1, 3})
    assert not list(tmp_path.iterdir())


def test_log_directory_that_cannot_be_cleared_is_refused(tmp_path, monkeypatch):
    (tmp_path / "rank-0.log").touch()

    def refuse(path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(os, "unlink", refuse)
    with pytest.raises(InvalidArgument, match="or old logs in it cannot be removed: Permission denied; choose"):
        Ranks(0, log_dir=str(tmp_path))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here, which is always full")
def test_full_disk_is_told_once_for_each_log_and_stops_nobody(tmp_path):
    for rank in range(2):
        (tmp_path / f"rank-{rank}.log").symlink_to("/dev/full")
    with Ranks(2, log_dir=str(tmp_path)) as ranks:
        for _ in range(3):
            ranks.write(0, b"x\n")
            ranks.write(1, b"y\n")
        assert ranks.close()
        assert sorted(ranks.stdout.getvalue()) == sorted("[rank 0] x\n" * 3 + "[rank 1] y\n" * 3)
        why = "cannot be written: No space left on device; it is incomplete from here on"
        logs = [tmp_path / f"rank-{rank}.log" for rank in range(2)]
        lines = sorted(ranks.stderr.getvalue().splitlines())
        assert lines == [f"gradsync: warning: log file {log} {why}" for log in logs]


def test_log_file_that_cannot_be_opened_is_told_and_stops_nobody(tmp_path):
    (tmp_path / "rank-0.log").mkdir()
    with Ranks(2, log_dir=str(tmp_path)) as ranks:
        ranks.write(0, b"x\n")
        ranks.write(0, b"x\n")
        ranks.write(1, b"y\n")
        assert ranks.close()
        assert sorted(ranks.stdout.getvalue()) == sorted("[rank 0] x\n" * 2 + "[rank 1] y\n")
        why = "cannot be written: Is a directory; it is incomplete from here on"
        assert ranks.stderr.getvalue() == f"gradsync: warning: log file {tmp_path / 'rank-0.log'} {why}\n"
    assert (tmp_path / "rank-1.log").read_text() == "y\n"


def test_log_directory_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InvalidArgument, match="'/.*file/logs' cannot be made, .*: Not a directory"):
        Ranks(0, log_dir=str(tmp_path / "file" / "logs"))


def test_what_the_launcher_printed_before_comes_first():
    with pipe_stream() as (reader, stdout):
        print("from the launcher", file=stdout)
        ranks = Ranks(1, stdout)
        ranks.write(0, b"x\n")
        assert ranks.close()
        assert read_until(reader, rb"x\n") == b"from the launcher\n[rank 0] x\n"


def test_quiet_output_takes_no_time():
    with pipe_stream() as (reader, stdout), Ranks(1, stdout) as ranks:
        ranks.write(0, b"prompt ")
        read_until(reader, b"prompt ")
        clocks = [time.pthread_getcpuclockid(writer.ident) for writer in ranks.forwarder._writers]
        before = sum(map(time.clock_gettime, clocks))
        time.sleep(0.5)
        assert sum(map(time.clock_gettime, clocks)) - before < 0.01


def test_draining_waits_for_a_slow_reader_and_drops_nothing():
    screen_reader, screen_writer = os.pipe()
    fcntl.fcntl(screen_writer, fcntl.F_SETPIPE_SZ, 4096)
    rank_reader, rank_writer = os.pipe()
    other_reader, other_writer = os.pipe()
    printed = b"".join(b"line %d\n" % number for number in range(5_000))  # fits the rank's pipe, not the screen's
    assert os.write(rank_writer, printed) == len(printed)
    os.close(rank_writer)
    os.close(other_writer)
    shown = b""
    with open(screen_writer, "w") as screen:
        forwarder = OutputForwarder(screen, screen, prefix=False)
        forwarder.add(0, rank_reader, other_reader)
        forwarder.start()
        assert not forwarder.finish(0.2)
        while not forwarder.finish(0.01):
            shown += os.read(screen_reader, 1000)
    with open(screen_reader, "rb") as rest:
        assert shown + rest.read() == printed


def test_interpreter_ends_while_the_terminal_stands_still():
    code = """
import os, sys
from gradsync.launching.output import OutputForwarder

forwarder = OutputForwarder(sys.stdout, sys.stderr, prefix=True)
(out, to_out), (err, to_err) = os.pipe(), os.pipe()
forwarder.add(0, out, err)
forwarder.start()
os.set_blocking(to_out, False)
os.write(to_out, b"x\\n" * 20000)
forwarder.finish(0.3)
"""
    reader, writer = os.pipe()  # with 40,000 bytes, and a prefix for each two of them, it is full
    process = subprocess.run(
        [sys.executable, "-c", code], stdout=writer, stderr=subprocess.PIPE, timeout=60, check=False
    )
    os.close(writer)
    os.close(reader)
    assert (process.returncode, process.stderr) == (0, b"")
