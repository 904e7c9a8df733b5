"""What takes bytes or text from outside, each as a function of bytes that may end in typed errors only.

A target that raises, or that holds much more memory than its
input accounts for, is a defect. What a target makes of its bytes (the name of a variable, the type of a message) is
drawn from them, so that a mutation leads somewhere else.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgpack

from gradsync import environment
from gradsync.arguments import parse_address
from gradsync.bench.models import read_shapes
from gradsync.bench.thresholds import parse_megabytes
from gradsync.communicators.agreement import Agreement, Description, mismatch
from gradsync.environment import read_environment, read_secret_file
from gradsync.errors import GradsyncError, InvalidArgument, RendezvousError
from gradsync.launching.in_rank.result import ErrorReport, read_report
from gradsync.launching.job import parse_gpus
from gradsync.rendezvous.frames import (
    SCHEMAS,
    Close,
    Ended,
    Event,
    FieldError,
    FrameType,
    Inspected,
    Lost,
    Message,
    Received,
    Started,
    Tick,
    check_fields,
)
from gradsync.rendezvous.handshake import NONCE_BYTES, ClientHandshake, ServerHandshake
from gradsync.rendezvous.liveness import ProcessState, process_key
from gradsync.rendezvous.protocol import RendezvousCore
from gradsync.rendezvous.secret_files import _read as read_meeting
from gradsync.rendezvous.sockets import look_up
from gradsync.rendezvous.wire import MAX_FRAME_BYTES, Frame, FrameReader, Session, _decode, pack_frame, sign

Target = Callable[[bytes], None]

SECRET, RUN = bytes(32), "run"
KEYS = {"send_key": b"s" * 32, "receive_key": b"r" * 32}
REQUESTS = [kind for kind in FrameType if kind in SCHEMAS and not kind.from_server]
_CONNECTIONS, RANKS = 6, 3
# What the decoder raises at the end of a script, and where that is no msgpack.
_NO_MSGPACK = (ValueError, TypeError, OverflowError, msgpack.exceptions.UnpackException)
VARIABLES = (
    *sorted(environment.VARIABLES),
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    *("SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_ID"),
    *("SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_JOB_ID"),
)


def frames(data: bytes) -> None:
    """A stream, in pieces of the length that the first byte says, before a session and after it began."""
    reader, session = FrameReader(), Session(**KEYS, is_server=True)
    if data[:1] > b"\x7f":
        reader.limit_bytes = MAX_FRAME_BYTES
    piece_bytes = 1 + (data[0] & 0x7F if data else 0)
    with contextlib.suppress(RendezvousError):
        for start in range(1, len(data), piece_bytes):
            reader.feed(data[start : start + piece_bytes])
            while (frame := reader.next_frame()) is not None:
                session.open(frame)
                raise AssertionError("a frame without a key was accepted")


def sealed_bodies(data: bytes) -> None:
    """A body of any bytes under a MAC that holds: what a member that has gone mad would send."""
    for is_server in (True, False):
        session = Session(**KEYS, is_server=is_server)
        signed = pack_frame(data[0] if data else 0, session._receive_sequence, data[1:MAX_FRAME_BYTES])
        frame = Frame(signed[4], session._receive_sequence, signed + sign(session._mac_received, signed))
        with contextlib.suppress(RendezvousError):
            message = session.open(frame)
            check_fields(message.type, message.fields)


def server_handshake(data: bytes) -> None:
    """What a stranger says to the server."""
    handshake, reader = ServerHandshake(SECRET, RUN, bytes(32)), FrameReader()
    reader.feed(data)
    with contextlib.suppress(RendezvousError):
        while (frame := reader.next_frame()) is not None:
            assert isinstance(handshake.receive(frame), bytes), "a stranger has proved to know the secret"


def client_handshake(data: bytes) -> None:
    """What a stranger answers to a client."""
    handshake, reader = ClientHandshake(SECRET, bytes(NONCE_BYTES)), FrameReader()
    reader.feed(data)
    with contextlib.suppress(RendezvousError):
        while (frame := reader.next_frame()) is not None:
            handshake.receive(frame)
            raise AssertionError("a stranger has proved to know the secret")


def server_core(data: bytes) -> None:
    """Events in any order, with fields that fit their schemas: msgpack arrays of [connection, what, fields ...]."""
    script = _Script()
    core, now = RendezvousCore(RANKS, machine="m"), 0.0
    for event in script.events(data):
        now += 0.5
        for action in core.handle(now, event):
            if isinstance(action, Close):
                script.close(action.connection)
        due = core.next_deadline()
        assert due is None or due >= 0.0, "a deadline that never comes"


class _Script:
    """Events as the server's loop would tell them: of a connection that was closed comes nothing but its end."""

    def __init__(self) -> None:
        self._connections = list(range(_CONNECTIONS))
        self._sequences = [1] * _CONNECTIONS
        self._closed: set[int] = set()

    def close(self, connection: int) -> None:
        self._closed.add(connection)

    def events(self, data: bytes) -> Iterator[Event]:
        unpacker = msgpack.Unpacker(raw=False, strict_map_key=False, max_buffer_size=MAX_FRAME_BYTES)
        unpacker.feed(data[:MAX_FRAME_BYTES])
        with contextlib.suppress(*_NO_MSGPACK):
            for step in unpacker:
                if type(step) is not list or [type(item) for item in step[:2]] != [int, int]:
                    continue
                event = self._event(step[0] % _CONNECTIONS, step[1], tuple(step[2:]))
                if event is not None:
                    yield event

    def _event(self, slot: int, what: int, fields: tuple[object, ...]) -> Event | None:
        connection = self._connections[slot]
        others: list[Event] = [Tick(), Lost(connection, "gone"), Started(slot % RANKS, 7), Ended(slot % RANKS, "ended")]
        others += [Inspected(peer, state) for peer in (connection, process_key(slot % RANKS)) for state in ProcessState]
        what %= len(REQUESTS) + len(others)
        if what >= len(REQUESTS):
            event = others[what - len(REQUESTS)]
            if isinstance(event, Lost):
                self._connections[slot] = max(self._connections) + 1
            return event
        with contextlib.suppress(FieldError):
            check_fields(REQUESTS[what], fields)
            if connection not in self._closed:
                self._sequences[slot] += 1
                return Received(connection, Message(REQUESTS[what], self._sequences[slot], fields))
        return None


def message_fields(data: bytes) -> None:
    """Any msgpack, checked against every schema."""
    with contextlib.suppress(RendezvousError):
        fields = _decode(data[:MAX_FRAME_BYTES])
        for kind in SCHEMAS:
            with contextlib.suppress(FieldError):
                check_fields(kind, fields)


def report_pipe(data: bytes) -> None:
    """What comes from a rank to its launcher."""
    file = os.memfd_create("gradsync-result", os.MFD_CLOEXEC)
    message, _, content = data.partition(b"\n")
    os.write(file, content)
    report = read_report(message + b"\n", file)
    if isinstance(report, ErrorReport):
        os.close(file)
        assert report.text


def secret_file(data: bytes) -> None:
    """A file that a user names as the run's secret."""
    with _file_of(data) as path, contextlib.suppress(InvalidArgument):
        read_secret_file(path)


def meeting_file(data: bytes) -> None:
    """A file in which rank 0 has left where it hosts."""
    with _file_of(data) as path, contextlib.suppress(InvalidArgument):
        found = read_meeting(path)
        assert found is not None
        assert found.secret.hex() not in repr(found._replace(address=""))


def shapes_file(data: bytes) -> None:
    """A file of gradients; what was read from it reads the same once it is written."""
    with _file_of(data) as path, contextlib.suppress(InvalidArgument):
        specs = read_shapes(path)
        Path(path).write_text(json.dumps([[spec.label, spec.shape, spec.dtype] for spec in specs]))
        assert read_shapes(path) == specs


def plan_texts(data: bytes) -> None:
    """What other ranks say that they were about to do, for the error that names the difference."""
    texts = data.decode("utf-8", "replace").split("\x1e")
    descriptions = {rank: Description.from_text(text) for rank, text in enumerate(texts)}
    assert (
        mismatch("rank 0/2", Agreement(0, lambda: descriptions[0]), descriptions).descriptions.keys()
        == descriptions.keys()
    )


def addresses(data: bytes) -> None:
    """host:port, as arguments and variables have it; a name is looked up only where no server would be asked."""
    text = data.decode("utf-8", "surrogateescape")
    with contextlib.suppress(InvalidArgument):
        host, port = parse_address(text)
        assert host
        assert 0 < port < 2**16
        if not all(character.isalnum() or character in ".-" for character in host) or len(host) > 255:
            with contextlib.suppress(OSError):
                look_up(host, port)


def variables(data: bytes) -> None:
    """Environment variables: records of one byte for the name and a text up to a zero byte."""
    environ = {}
    for record in data.split(b"\0"):
        environ[VARIABLES[record[0] % len(VARIABLES)] if record else "RANK"] = record[1:].decode("latin-1")
    readers: tuple[Callable[[], object], ...] = (
        lambda: read_environment(dict(environ)),
        lambda: environment.check_removed_variables(environ),
        *[lambda variable=variable: variable.read(environ) for variable in environment.VARIABLES],
    )
    environ.pop(environment.SECRET_FILE, None)  # a file of this machine: `secret_file` has those
    for read in readers:
        with contextlib.suppress(GradsyncError):
            read()


def command_line_texts(data: bytes) -> None:
    """Lists that are options: GPUs, and thresholds in megabytes."""
    text = data.decode("utf-8", "replace")
    for read in (parse_gpus, parse_megabytes):
        with contextlib.suppress(InvalidArgument):
            read(text)


TARGETS: dict[str, Target] = {
    target.__name__: target
    for target in (
        *(frames, sealed_bodies, message_fields, server_handshake, client_handshake, server_core),
        *(report_pipe, secret_file, meeting_file, shapes_file, plan_texts),
        *(addresses, variables, command_line_texts),
    )
}


@contextlib.contextmanager
def _file_of(data: bytes) -> Iterator[str]:
    """Writes a file that only this user can read."""
    with tempfile.TemporaryDirectory(dir=_fast_folder()) as folder:
        path = Path(folder) / "file"
        path.touch(mode=0o600)
        path.write_bytes(data)
        yield str(path)


def _fast_folder() -> str | None:
    """Returns a folder in memory, where there is one: thousands of files a second go through it."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
