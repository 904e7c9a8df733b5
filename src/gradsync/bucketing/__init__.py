"""Bucketing: from single gradients to flat buffers, and back."""

from gradsync.bucketing.forgotten import raise_forgotten, report_forgotten_at_exit

__all__ = ["raise_forgotten", "report_forgotten_at_exit"]
