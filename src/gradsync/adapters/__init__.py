"""Adapters for loops in which another library computes the gradients.

    import gradsync.adapters.torch  # needs PyTorch
    import gradsync.adapters.jax    # needs JAX

An adapter uses only gradsync's public functions. Import an adapter by its name, because it imports its library.
"""

from __future__ import annotations


def without(library: str, extra: str) -> ImportError:
    """Returns the error of an adapter whose library is not installed.

    Args:
        library: the library's name.
        extra: the extra of gradsync that installs the library.
    """
    return ImportError(f"gradsync.adapters.{extra} needs {library}: pip install 'gradsync[{extra}]'", name=extra)
