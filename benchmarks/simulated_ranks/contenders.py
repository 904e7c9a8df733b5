"""The names of the compared servers, and of the phases of their simulated ranks."""

from __future__ import annotations

GRADSYNC = "gradsync"
TCPSTORE = "TCPStore"
TCPSTORE_OWN = "TCPStore, its own clients"  # in threads; the other servers' ranks are simulated
CONTENDERS = (GRADSYNC, TCPSTORE, TCPSTORE_OWN)

JOIN = "join"  # connect, authenticate, and wait until all have joined
PUT_ID = "put id"  # rank 0 hands 128 bytes in ...
GET_ID = "get id"  # ... and all others ask for them
BARRIER = "barrier"
LEAVE = "leave"
PHASES = (JOIN, PUT_ID, GET_ID, BARRIER)
UNIQUE_ID = bytes(range(128))  # as long as an NCCL id
