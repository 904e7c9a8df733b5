"""Launching: the supervisor, which starts and watches ranks, and the functions and commands that use it."""
