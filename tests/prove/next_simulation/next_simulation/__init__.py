"""The real server and the real clients in one thread, on a network and a clock that a seed decides about."""
