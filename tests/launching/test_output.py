"""What a person sees of ranks that print: lines with their rank, prompts, progress bars, logs; a screen that is lost.

A rank of these tests writes what the test tells it, byte by byte, at the moment that the test chooses.
"""

import contextlib
import fcntl
import os
import random
import re
import select
import signal
import sys
import termios
import tty
from pathlib import Path

import pytest

from commands import wait_until

# Each rank does what it reads in its own pipe: Python's text of (stream, bytes); the last rank's end closes nothing.
PUPPET = """
    import os, sys
    for line in open(sys.argv[1] + os.environ["RANK"]):
        stream, data = eval(line)  # or it ends here
        os.write(stream, data)
"""


class Puppets:
    """Ranks of `gradsync run` that write what the test says."""

    def __init__(self, cli, script, folder, ranks, *options, terminal=False):
        for rank in range(ranks):
            os.mkfifo(folder / f"rank{rank}")
        streams = {}
        if terminal:
            self.screen, screen = os.openpty()
            tty.setraw(screen)
            streams = {"stdout": screen, "stderr": screen}
        self.process = cli.start(
            *("run", "-n", ranks, *options, script(PUPPET), folder / "rank"), text=False, errors=None, **streams
        )
        if terminal:
            os.close(screen)
        else:
            self.screen, self.errors = self.process.stdout.fileno(), self.process.stderr.fileno()
        # Opening to read and write waits for nobody.
        self._orders = [os.open(folder / f"rank{rank}", os.O_RDWR) for rank in range(ranks)]

    def write(self, rank, data, stream=1):
        os.write(self._orders[rank], f"({stream}, {data!r})\n".encode())

    def read_until(self, pattern, stream=None):
        """Reads until the pattern has come, and gives all that came."""
        data = b""
        while not re.search(pattern, data, re.DOTALL):
            assert select.select([stream or self.screen], [], [], 60)[0], f"{pattern!r} did not come, but {data!r}"
            data += os.read(stream or self.screen, 65536)
        return data

    def end(self, *ranks, code=0):
        for rank in ranks:
            self.write(rank, b"", 1)
            os.write(self._orders[rank], b"exit(%d)\n" % code)

    def close(self):
        for order in self._orders:
            os.close(order)
        if self.process.stdout is None:
            os.close(self.screen)


@pytest.fixture
def puppets(cli, script, tmp_path):
    with contextlib.ExitStack() as stack:

        def start(ranks, *options, **settings):
            found = Puppets(cli, script, tmp_path, ranks, *options, **settings)
            stack.callback(found.close)
            return found

        yield start


# What ranks 0 and 1 write one after the other, and all that then is on the screen.
SHOWN = [
    ((0, b"out\n"), b"[rank 0] out\n"),
    ((1, b"one\ntwo\n"), b"[rank 1] one\n[rank 1] two\n"),
    # A prompt is shown before its line ends, and goes on; another rank begins a new line.
    ((0, b"name? "), b"[rank 0] name? "),
    ((0, b"thanks\nbye\n"), b"thanks\n[rank 0] bye\n"),
    ((0, b"(Pdb) "), b"[rank 0] (Pdb) "),
    ((1, b"hello\n"), b"\n[rank 1] hello\n"),
    ((0, b"later\n"), b"[rank 0] later\n"),
    # Of a progress bar each state is a line, with what a terminal shows of it: tqdm draws first \r and then a state.
    ((0, b"\r  0%"), b"[rank 0]   0%\n"),
    ((1, b"  0%\r"), b"[rank 1]   0%\n"),
    ((0, b"\r 50%"), b"[rank 0]  50%\n"),
    ((0, b"\r100%\n"), b"[rank 0] 100%\n"),
    ((1, b"100%\r\nafter\n"), b"[rank 1] 100%\n[rank 1] after\n"),
    ((0, b"10%\r20%\rdone\r\nnext\n\r 1%\r 2%\n"), b"[rank 0] done\n[rank 0] next\n[rank 0]  2%\n"),
    ((0, b"10%"), b"[rank 0] 10%"),
    ((0, b"\r20%\n"), b"\n[rank 0] 20%\n"),
    # Neither a state twice, nor a bare prefix of a bar that erases itself.
    ((0, b"\r50%"), b"[rank 0] 50%\n"),
    ((0, b"\r50%\nx\n"), b"[rank 0] x\n"),
    ((0, b"\r60%"), b"[rank 0] 60%\n"),
    ((0, b"\r\x1b[2Kdone\n"), b"[rank 0] done\n"),
    ((0, b"\r70%\r\x1b[2K\n\x1b[31mred\x1b[0m\n"), b"[rank 0] \x1b[31mred\x1b[0m\n"),
    # Two bars of one program: a newline goes down to the second, and up again; in the end the first is left.
    ((0, b"\rall  0%\n\rpart 0%\x1b[A"), b"[rank 0] all  0%\n[rank 0] part 0%\n"),
    ((0, b"\rall  0%\n\rpart 50%\x1b[A"), b"[rank 0] part 50%\n"),
    ((0, b"\rall 50%\n\r\x1b[2K\x1b[A\rall 100%\n\x1b[1A\x1b[2K\rall 100%\nend\n"), b"[rank 0] end\n"),
    ((0, bytes(set(range(256)) - {10, 13}) + b"\n"), b"[rank 0] " + bytes(set(range(256)) - {10, 13}) + b"\n"),
]


def test_lines_prompts_and_progress_bars_of_two_ranks(puppets):
    ranks = puppets(2, terminal=True)  # where states of a bar come soon
    for (rank, data), shown in SHOWN:
        ranks.write(rank, data)
        assert ranks.read_until(re.escape(shown)) == shown, data
    ranks.end(0, 1)
    assert ranks.process.wait(60) == 0


def test_each_stream_of_the_ranks_goes_to_the_same_of_the_launcher(puppets):
    ranks = puppets(2)
    ranks.write(0, b"err\n", 2)
    assert ranks.read_until(b"\n", ranks.errors) == b"[rank 0] err\n"
    ranks.write(0, b"\r10%\r20%")
    assert ranks.read_until(b"\n") == b"[rank 0] 20%\n"
    ranks.write(0, b"\r30%\r40%")  # in a file only the last state of these seconds
    ranks.write(1, b"no newline")
    assert ranks.read_until(b"line") == b"[rank 1] no newline"
    ranks.end(0, 1)
    assert ranks.process.communicate(timeout=60)[0] == b"\n[rank 0] 40%\n"
    assert ranks.process.returncode == 0


def test_without_prefix_bytes_pass_as_they_are(puppets):
    ranks = puppets(2, "--no-prefix")
    for rank, data in [(0, b"one\r\ntwo\rthree"), (1, b"other\n"), (0, b"\r\x1b[2Kopen")]:
        ranks.write(rank, data)
        assert ranks.read_until(re.escape(data)) == data
    ranks.end(0, 1)
    assert ranks.process.communicate(timeout=60)[0] == b""


def test_on_one_terminal_each_stream_with_a_prefix_has_its_own_line(puppets, tmp_path):
    ranks = puppets(1, "--prefix", terminal=True)
    ranks.write(0, b"name? ")
    ranks.read_until(rb"\? ")
    ranks.write(0, b"a warning\n", 2)
    assert ranks.read_until(b"warning\n") == b"\n[rank 0] a warning\n"
    ranks.end(0)
    assert ranks.process.wait(60) == 0
    (tmp_path / "rank0").unlink()
    ranks = puppets(1, "--no-prefix", terminal=True)
    ranks.write(0, b"loading ")
    ranks.read_until(b"loading ")
    ranks.write(0, b"a warning", 2)
    assert ranks.read_until(b"warning") == b"a warning"
    ranks.end(0)
    assert ranks.read_until(b"\n") == b"\n"  # what comes next begins a line


def test_one_rank_needs_no_prefix_and_a_line_comes_when_it_is_printed(cli, script):
    launcher = cli.start("run", "-n", 1, script("import signal; print('early', flush=True); signal.pause()"))
    assert launcher.stdout.readline() == "early\n"
    launcher.terminate()
    launcher.result()


def test_nothing_is_lost_and_nothing_doubled(cli, script, tmp_path):
    """Random pieces of lines from three ranks; each line of the screen begins with its rank."""
    seed = random.randrange(1 << 32)
    rng = random.Random(seed)
    pieces = [b"a", b"bc ", b"\n", b"\r\n", "é".encode(), b"\xff", b"x" * 5000]
    chunks = [[b"".join(rng.choices(pieces, k=rng.randrange(1, 9))) for _ in range(300)] for _ in range(3)]
    (tmp_path / "chunks").write_text(repr(chunks))
    path = script(
        """
        import os, sys, time
        for chunk in eval(open(sys.argv[1]).read())[int(os.environ["RANK"])]:
            os.write(1, chunk)
            if b"c " in chunk:
                time.sleep(0.001)
        """
    )
    done = cli("run", "-n", 3, path, tmp_path / "chunks", text=False, errors=None)
    lines = done.out.split(b"\n")[:-1]
    assert all(line.startswith(b"[rank ") for line in lines), seed
    for rank in range(3):
        # Where the next piece of a line is late, it may be cut in two.
        shown = b"".join(line[9:] for line in lines if line.startswith(b"[rank %d]" % rank))
        assert shown == b"".join(chunks[rank]).replace(b"\r\n", b"").replace(b"\n", b""), seed


def test_an_endless_line_passes_in_pieces(cli, script):
    launcher = cli.start(
        *("run", "-n", 1, "--prefix", script("import os, signal\nos.write(1, b'x' * (3 << 20))\nsignal.pause()")),
        **{"text": False, "errors": None},
    )
    seen = 0
    while seen < (3 << 20) + len(b"[rank 0] "):  # no newline, and yet it comes
        seen += len(os.read(launcher.stdout.fileno(), 65536))
    launcher.terminate()
    launcher.wait(60)


def test_the_last_output_in_a_report_is_whole_lines_of_each_stream(puppets):
    ranks = puppets(2, "--no-prefix")
    for stream, data in [(1, b"half "), (2, b"a warning\n"), (1, b"done\n\r10%\r\x1b[2K20%\n"), (1, b"rest")]:
        ranks.write(1, data, stream)
        ranks.read_until(re.escape(data), ranks.errors if stream == 2 else None)
    ranks.end(1, code=3)
    err = ranks.process.communicate(timeout=60)[1]
    assert b"last output of rank 1:\n    a warning\n    half done\n    20%\n    rest\ngradsync: rank 1" in err


# -- Logs --------------------------------------------------------------------------------------------------------------


def test_logs_hold_the_bytes_of_both_streams_of_the_last_run(puppets, cli, script, tmp_path):
    logs = tmp_path / "deep" / "logs"
    logs.mkdir(parents=True)
    kept = ["notes.txt", "rank-0.log.gz", "rank-0.restart-x.log", "old/rank-0.log", "rank-5.log/x"]
    for name in kept:
        (logs / name).parent.mkdir(exist_ok=True)
        (logs / name).write_text("mine")
    (logs / "rank-3.log").symlink_to("notes.txt")
    for name in ("rank-0.log", "rank-4.log", "rank-1.restart-2.log"):  # of an earlier run
        (logs / name).write_text("old")
    ranks = puppets(2, "--log-dir", logs)
    ranks.write(1, b"out \xff\r\n")
    ranks.read_until(b"\n")
    ranks.write(1, b"err", 2)
    ranks.read_until(b"err", ranks.errors)
    ranks.end(0, 1)
    assert ranks.process.wait(60) == 0
    assert (logs / "rank-1.log").read_bytes() == b"out \xff\r\nerr"
    assert (logs / "rank-0.log").read_bytes() == b""
    assert all((logs / name).read_text() == "mine" for name in kept)
    assert (logs / "rank-3.log").is_symlink()
    assert not (logs / "rank-4.log").exists()
    assert not (logs / "rank-1.restart-2.log").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here, which is always full")
def test_a_log_that_cannot_be_written_is_told_once_and_stops_nobody(cli, script, tmp_path):
    (tmp_path / "rank-0.log").symlink_to("/dev/full")
    (tmp_path / "rank-1.log").mkdir()
    path = script("import os\nfor _ in range(3): os.write(1, b'x\\n')")
    code, out, err = cli("run", "-n", 3, "--log-dir", tmp_path, path).told
    assert (code, len(out.splitlines())) == (0, 9)
    first, second = sorted(line for line in err.splitlines() if "log file" in line)
    assert first.startswith(f"gradsync: warning: log file {tmp_path / 'rank-0.log'} ")
    assert "No space left on device" in first
    assert second.startswith(f"gradsync: warning: log file {tmp_path / 'rank-1.log'} ")
    assert "Is a directory" in second
    assert (tmp_path / "rank-2.log").read_text() == "x\n" * 3


# -- A screen that takes nothing ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def unread_pipe():
    reader, writer = os.pipe()
    try:
        yield reader, writer
    finally:
        os.close(reader)
        os.close(writer)


def is_full(writer):
    return not select.select([], [writer], [], 0)[1]


def fill(writer):
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, b"." * 4096)
    os.set_blocking(writer, True)


FLOOD = "import sys\nwhile True: sys.stderr.write('x' * 1000 + '\\n')"


def test_a_signal_ends_a_flood_that_nobody_reads(cli, script):
    with unread_pipe() as (_, writer):
        launcher = cli.start("run", "--grace", 1, "-n", 2, script(FLOOD), stdout=writer, stderr=writer)
        wait_until(lambda: is_full(writer))
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(60) == 128 + signal.SIGTERM


def test_a_signal_while_the_last_output_waits_ends_the_job_and_no_restart_comes(cli, script, tmp_path):
    path = script("import os, sys\nopen(sys.argv[1], 'w').close()\nos.write(1, b'x' * 60_000)\nsys.exit(3)")
    os.mkfifo(tmp_path / "fifo")
    with unread_pipe() as (_, writer):
        fill(writer)
        launcher = cli.start(
            *("run", "--grace", 1, "-n", 1, "--max-restarts", 3, path, tmp_path / "fifo"), stdout=writer, stderr=writer
        )
        (tmp_path / "fifo").read_text()  # waits until the rank is there
        wait_until(lambda: not Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text())
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(60) == 128 + signal.SIGTERM


def test_a_blocked_stdout_does_not_hold_up_stderr_and_a_slow_reader_loses_nothing(puppets):
    ranks = puppets(2, "--no-prefix")
    fcntl.fcntl(ranks.screen, fcntl.F_SETPIPE_SZ, 4096)
    written = b"".join(b"line %d\n" % number for number in range(5_000))  # far more than the screen takes
    for begin in range(0, len(written), 1000):
        ranks.write(0, written[begin : begin + 1000])
    wait_until(lambda: unread(ranks.screen) > 2000)
    ranks.write(1, b"help\n", 2)
    assert ranks.read_until(b"\n", ranks.errors) == b"help\n"
    ranks.end(0, 1)
    shown = b""
    while chunk := os.read(ranks.screen, 4000):
        shown += chunk
    assert shown == written
    assert ranks.process.wait(60) == 0


def unread(pipe):
    return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)


def test_the_reader_of_the_output_may_leave(cli, script):
    launcher = cli.start("run", "-n", 2, script("for n in range(10**9): print(n)"))
    launcher.stdout.readline()
    launcher.stdout.close()
    err = launcher.stderr.read()
    assert launcher.wait(60) == 1
    assert err.startswith("gradsync: standard output cannot be written: Broken pipe\n")
    assert "BrokenPipeError" in err
    assert "Exception in thread" not in err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here, which is always full")
def test_why_standard_output_cannot_be_written_is_told_once(cli, script):
    path = script(
        """
        import os, sys
        try:
            while True:
                os.write(int(sys.argv[1]), b"x\\n")
        except BrokenPipeError:
            os.write(3 - int(sys.argv[1]), b"still heard\\n")
        """
    )
    with open("/dev/full", "w") as full:
        done = cli("run", "-n", 2, path, 1, stdout=full)
        assert done.code == 0
        warning = "gradsync: standard output cannot be written: No space left on device\n"
        assert sorted(done.told[2].splitlines(True)) == ["[rank 0] still heard\n", "[rank 1] still heard\n", warning]
        done = cli("run", "-n", 1, path, 2, stderr=full)
        assert (done.code, done.out) == (0, "still heard\n")


def test_a_restart_needs_no_reader_and_the_last_failure_counts(cli, script, tmp_path):
    path = script(f"open({str(tmp_path / 'starts')!r}, 'a').write('x'); raise SystemExit(9)")
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as gone:
        assert cli("run", "-n", 1, "--max-restarts", 1, path, stderr=gone, stdout=gone).code == 9
    assert (tmp_path / "starts").read_text() == "xx"


def test_closed_standard_streams_are_not_taken_by_others(cli, script, tmp_path):
    path = script("import os, sys; print('x'); open(sys.argv[1], 'wb').write(os.read(0, 100) + b'end')")
    line = f'"{sys.executable}" -m gradsync run -n 1 "{path}" "{tmp_path}/out" <&- >&- 2>&-'
    assert cli.program("sh", "-c", line).code == 0
    assert (tmp_path / "out").read_bytes() == b"end"
