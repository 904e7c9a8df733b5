"""Names that belong together: what a group of ranks shares is called as the group, or "group/..."."""

from __future__ import annotations


def is_under(name: str, scope: str) -> bool:
    """Whether a name is the scope's own, or stands under it."""
    return name == scope or name.startswith(f"{scope}/")
