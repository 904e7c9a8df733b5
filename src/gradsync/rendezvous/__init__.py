"""Rendezvous: the ranks of a run find each other, share small values, and hear of each other's failures.

What other rooms need of it, and all that they import:

- `client.RendezvousClient`: a rank's place in a generation, or in a group of its ranks. `connect`, `group`, `close`,
  `abandon`; `set`, `get(from_rank=)`, `delete`, `exchange`, `barrier`; `agree`, `launched_position`, `follow`,
  `unfollow`; `announce_left`, `left_ranks`; `check`, `has_failed`, `report_failure`, `report_waiting`, `report_stuck`,
  `describe_with`. The process group connects and closes; communicators use the rest.
- `server.RendezvousServer`: `start`, `serve_forever`, `stop`, `wait_until_empty`, `abandon`; `note_start` and
  `note_end`, by which a launcher says what it knows of its processes. Launchers, and a rank that hosts, use it.
- `frames.Decision`, `LaunchedEvent`, `event_key`: what NCCL's agreement is answered with; `OF_MESSAGES` and the limits
  `MAX_...`: what a value, a report and a description may hold.
- `sockets.bind_listener`, `format_address`, `look_up`, `raise_limit`: for launchers.
- `hosting.join`: who hosts, and where; the process group's way to a client.
- `secret_files`: how processes of one machine find a server and its secret.

A generation is the ranks that have joined together. It forms when all that were launched have joined and said which
process they are, or, after a failure, of those that come (`connect(min_ranks=)`). The first failure ends it for all its
ranks: each hears the same, at once, and at every later call. What the ranks share ends with it.

From below: `liveness` (clocks of silence), `frames` (types and schemas), `wire` (sealed frames), `handshake` and
`sockets`; the server's core, without I/O: `roster`, `store`, `agreement_service`, `stuck`, `protocol`; then `server` on
one side, `connection` and `client` on the other; `secret_files` and `hosting` bring them together.
"""
