"""Adapters: gradsync where another library computes the gradients.

    import gradsync.adapters.torch  # needs PyTorch
    import gradsync.adapters.jax    # needs JAX

Each adapter uses only what programs can use too. Import it by name, because it imports its library.
"""

from __future__ import annotations


def without(library: str, extra: str) -> ImportError:
    """Returns the error of an adapter whose library is not installed.

    Args:
        library: its name.
        extra: the extra of gradsync that installs it.
    """
    return ImportError(f"gradsync.adapters.{extra} needs {library}: pip install 'gradsync[{extra}]'", name=extra)
