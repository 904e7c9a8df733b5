"""Bucketing: from single gradients to flat buffers, and back."""

from gradsync.bucketing.forgotten import fail_at_exit, raise_forgotten, report_forgotten_at_exit

__all__ = ["fail_at_exit", "raise_forgotten", "report_forgotten_at_exit"]
