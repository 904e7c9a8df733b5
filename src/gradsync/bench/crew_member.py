"""A rank's end of a crew: joins the others, then sleeps in a socket until the controller asks for something.

A rank that waited inside its own library would spin, and other systems are measured meanwhile. It needs nothing but
Python: what is timed may live where little of gradsync can be imported.
"""

from __future__ import annotations

import contextlib
import os
import platform
import traceback
from collections.abc import Callable
from multiprocessing.connection import Client, Connection
from typing import Protocol

from gradsync.bench.crew import ANSWER, FAILURE, HELLO


class Member(Protocol):
    """What serves the requests on one rank: its public methods are what the controller may ask for.

    Attributes:
        rank: its number.
        versions: what it runs on.
    """

    rank: int
    versions: dict[str, str]

    def close(self) -> object:
        """Leaves the other ranks in order."""


def serve(address: str, join: Callable[[], Member]) -> None:
    """Runs this rank to its end; one that fails tells the controller why.

    Args:
        address: of the controller's socket.
        join: meets the other ranks.
    """
    with Client(address, "AF_UNIX") as connection:
        try:
            _serve(connection, join())
        except BaseException:
            with contextlib.suppress(OSError):
                connection.send((FAILURE, traceback.format_exc()))
            # An orderly exit would wait, inside the library, for a rank that is not coming.
            os._exit(1)


def _serve(connection: Connection, member: Member) -> None:
    versions = {"python": platform.python_version(), **member.versions}
    connection.send((HELLO, {"rank": member.rank, "pid": os.getpid(), "versions": versions}))
    with contextlib.suppress(EOFError):
        while True:
            method, *arguments = connection.recv()
            connection.send((ANSWER, getattr(member, method)(*arguments)))
    member.close()
