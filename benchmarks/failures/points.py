"""Names of the fault matrix: the phases of a run, the faults, and the victims that are not ranks."""

SPAWN, HELLO, AUTH, JOINED, INIT = "spawn", "hello", "auth", "joined", "init"
FIRST_BUCKET, MIDDLE_BUCKET, LAST_BUCKET = "first bucket", "middle bucket", "last bucket"
BARRIER, TEARDOWN = "barrier", "teardown"
PHASES = (SPAWN, HELLO, AUTH, JOINED, INIT, FIRST_BUCKET, MIDDLE_BUCKET, LAST_BUCKET, BARRIER, TEARDOWN)
KILL, STOP, RAISE, EXIT_0, EXIT_3, CLOSE, HALF_OPEN = "kill", "stop", "raise", "exit 0", "exit 3", "close", "half-open"
FAULTS = (KILL, STOP, RAISE, EXIT_0, EXIT_3, CLOSE, HALF_OPEN)
LAUNCHER = "launcher"
