"""What each target is begun with, where nothing was found yet: what is good, and a little that is not."""

from __future__ import annotations

import pickle

import msgpack
from targets import KEYS, RANKS, REQUESTS, RUN, SECRET, VARIABLES

from gradsync.communicators.agreement import Description
from gradsync.launching.in_rank.result import ERROR, RESULT, ErrorReport
from gradsync.rendezvous.frames import FrameType
from gradsync.rendezvous.handshake import NONCE_BYTES, ClientHandshake, ServerHandshake
from gradsync.rendezvous.wire import Frame, FrameReader, Session, pack_frame


def seeds() -> dict[str, list[bytes]]:
    """Returns them by target."""
    hello = ClientHandshake(SECRET, bytes(NONCE_BYTES)).hello()
    challenge = ServerHandshake(SECRET, RUN, bytes(32)).receive(_whole(hello))
    assert isinstance(challenge, bytes)
    client = Session(**KEYS, is_server=False)
    bodies = [bytes([kind]) + msgpack.packb(fields) for kind, *fields in _samples()]
    script = [[rank, 0, rank, RANKS, "m", "h", 7] for rank in range(RANKS)]
    script += [[0, REQUESTS.index(kind), *fields] for kind, *fields in _samples() if kind in REQUESTS]
    told = ErrorReport("Traceback", "ValueError", is_consequence=False).to_json()
    return {
        "frames": [b"\x00" + hello, b"\xff" + client.seal(FrameType.LEAVE, "", None, 0), b"\x03" + hello[:30]],
        "sealed_bodies": bodies,
        "message_fields": [body[1:] for body in bodies],
        "server_handshake": [hello, hello + pack_frame(FrameType.PROOF, 1, b"") + bytes(32)],
        "client_handshake": [challenge[:-32] + bytes(32), hello],
        "server_core": [b"".join(msgpack.packb(step) for step in script)],
        "report_pipe": [ERROR + told, RESULT + pickle.dumps(1), ERROR + b"\xff" * 16],
        "secret_file": [b"00" * 32, b"zz", b""],
        "meeting_file": [b"00" * 32 + b"\n127.0.0.1:4000\n", b"00"],
        "shapes_file": [b'[["a", [2, 3], "float32"], ["\'b\'", []]]', b"{}", b"[]"],
        "plan_texts": [b"\x1e".join(_description(length).to_text().encode() for length in (3, 4))],
        "addresses": [b"127.0.0.1:4000", b"[::1]:4000", b"a..b:1", b"h:0000800000", b"\xed\xa0\x80:1"],
        "variables": [
            b"".join(bytes([VARIABLES.index(name)]) + value + b"\0" for name, value in chosen)
            for chosen in (
                [("RANK", b"0"), ("WORLD_SIZE", b"2"), ("MASTER_ADDR", b"h"), ("MASTER_PORT", b"1")],
                [("SLURM_PROCID", b"1"), ("SLURM_NTASKS", b"4"), ("SLURM_STEP_ID", b"0"),
                 ("SLURM_STEP_TASKS_PER_NODE", b"2(x2)"), ("SLURM_STEP_NODELIST", b"n[1-2]")],
                [("GRADSYNC_RANK", b"0"), ("GRADSYNC_WORLD_SIZE", b"1"), ("GRADSYNC_SECRET", b"00" * 16)],
            )
        ],
        "command_line_texts": [b"0,1", b"0.25,1,10", b"GPU-8932f937,MIG-GPU-8932f937/1/0"],
    }  # fmt: skip


def _samples() -> list[list[object]]:
    """A message of most kinds."""
    return [
        [FrameType.JOIN, 0, 3, "m", "h", 7],
        [FrameType.SET, "k", b"v"],
        [FrameType.GET, "k", 1],
        [FrameType.EXCHANGE, "b", [0, 1], b""],
        [FrameType.EXCHANGE, "x", [0, 1], b"v"],
        [FrameType.CANCEL, 2],
        [FrameType.HEARTBEAT, {"g": 1}],
        [FrameType.STUCK, "g", None, 1, "all_reduce", 5000, [1], True],
        [FrameType.STATUS, {"g": [1, [[1, 7, "all_reduce", True]]]}, "report"],
        [FrameType.REPORT_FAILURE, "reason", None],
        [FrameType.LEAVE, "g", None, 3],
        [FrameType.LEFT_RANKS, "g", None],
        [FrameType.LEAVE, "", None, 0],
        [FrameType.REPLY, 2, b"v"],
        [FrameType.REPLY, 2, [1, 0, 3, 0]],
        [FrameType.VALUES, 2, True, [b"v", b"w"]],
        [FrameType.TIMED_OUT, 2, [1], "rank 1/3"],
        [FrameType.FAILED, 0, 0, 1, "phase", [], "text"],
    ]


def _description(length: int) -> Description:
    lines = f"'w': float32[{length}]", "called from train.py:3"
    return Description("all_reduce of float32[2, 3] (sum)", lines, callback="number 1", options="mean, clip_norm 1.0")


def _whole(data: bytes) -> Frame:
    reader = FrameReader()
    reader.feed(data)
    frame = reader.next_frame()
    assert frame is not None
    return frame
