"""Launching: one supervisor engine and its thin faces."""
