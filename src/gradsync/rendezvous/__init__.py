"""Rendezvous: the ranks of a run find each other, share small values, and learn of each other's failures.

The rest of gradsync imports only these names:

- `client.RendezvousClient`: a rank's membership of a generation, or of a group of its ranks. `connect`, `group`,
  `close`, `abandon`; `set`, `get(from_rank=)`, `delete`, `exchange`, `barrier`; `announce_left`, `left_ranks`; `check`,
  `has_failed`, `report_failure`, `report_waiting`, `report_stuck`, `describe_with`. The process group connects and
  closes, and communicators use the other methods.
- `server.RendezvousServer`: `start`, `serve_forever`, `stop`, `wait_until_empty`, `abandon`; a launcher reports the
  start and end of its processes with `note_start` and `note_end`. Launchers, and ranks that host the server, use this
  class.
- `wire.event_key`, `event_prefix`: the keys of the descriptions of collectives that differ. `OF_MESSAGES` marks a
  wait in a send or receive. The constants `MAX_...` limit the length of values, reports and descriptions; `clip_text`
  shortens texts to such a length.
- `sockets.bind_listener`, `format_address`, `look_up`, `raise_limit`, `ConnectionLost`: for launchers.
- `hosting.join`: decides which process hosts the server and at which address, hosts the server if this process is the
  host, joins, and returns this rank's client. `is_sent_over_mpi` says whether `join` needs an `Ask` function. The
  process group keeps a `JoinedRendezvous` for the next `join`.
- `secret_files`: how processes of one machine find a server and its secret.

A generation is a set of ranks that have joined together. A generation forms when all launched ranks have joined. At the
first failure every rank of the generation gets the same error, at once and at every later call that waits for an
answer. The server removes the keys and exchanges of a generation when all its connections have ended.

The modules from the bottom up:

- of both sides: `wire` (the handshake, and sealed messages) and `sockets`;
- of the server: `stuck` and `worlds`, which do no I/O; then `server`, the event loop;
- of a rank: `connection`, `client`;
- `secret_files`, and `hosting`, which starts the server, a client, or both.
"""
