"""Rendezvous: the ranks of a run find each other, share small values, and learn of each other's failures.

The modules, from the bottom up:

- of both sides: `wire`, the handshake, sealed messages and the limits of what they hold; `sockets`;
- of the server: `stuck` and `worlds`, which decide, and do no I/O; `server`, the event loop;
- of a rank: `connection`; `client`, a rank's membership of a generation, or of a group of its ranks;
- `secret_files`, by which processes of one machine find a server; `hosting`, which decides who hosts it, and joins.

A generation is the ranks that have joined together. At the first failure all get the same error, at once and at every
later call that waits for an answer.
"""
