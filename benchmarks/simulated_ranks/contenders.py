"""The names of the servers that are compared, and of what their simulated ranks do."""

from __future__ import annotations

GRADSYNC = "gradsync"
TCPSTORE = "TCPStore"
TCPSTORE_OWN = "TCPStore, its own clients"  # in threads, where the others' are simulated
CONTENDERS = (GRADSYNC, TCPSTORE, TCPSTORE_OWN)

JOIN = "join"  # connect, prove who one is, and wait until all have come
PUT_ID = "put id"  # rank 0 hands 128 bytes in ...
GET_ID = "get id"  # ... and all others ask for them
BARRIER = "barrier"
LEAVE = "leave"
PHASES = (JOIN, PUT_ID, GET_ID, BARRIER)
UNIQUE_ID = bytes(range(128))  # as long as an NCCL id
