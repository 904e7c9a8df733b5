"""Adapters for loops in which another library computes the gradients.

    import gradsync.adapters.torch  # needs PyTorch
    import gradsync.adapters.jax    # needs JAX

`import gradsync` imports no adapter, because every adapter imports another library.
"""

from __future__ import annotations


def without(library: str, extra: str) -> ImportError:
    """Returns the error that an adapter raises if its library is not installed.

    Args:
        library: the library's name.
        extra: the optional dependency of gradsync (pip's "extra") that installs the library.
    """
    return ImportError(f"gradsync.adapters.{extra} needs {library}: pip install 'gradsync[{extra}]'", name=extra)
