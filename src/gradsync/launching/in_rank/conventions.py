"""What a launcher and its ranks both go by, in a file that costs neither the other's modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

#: Exit code of a rank, and of the command, that Ctrl-C has ended: 128 and the number of SIGINT, as shells have it.
EXIT_CODE_INTERRUPTED = 130
#: What a function needs for a rank to find it, which imports the script under another name.
HOW_TO_DEFINE = "define it above the `if __name__` line, at the top level of its module"
#: A function and its positional and keyword arguments.
Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
