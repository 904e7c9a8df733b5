"""Adapters: gradsync where another library computes the gradients.

    import gradsync.adapters.torch  # needs PyTorch
    import gradsync.adapters.jax    # needs JAX

Each sits on top of what everyone may call, and is imported by name, as it brings its library with it.
"""

from __future__ import annotations


def without(library: str, extra: str) -> ImportError:
    """Returns the error of an adapter whose library is not installed.

    Args:
        library: what people call it.
        extra: of ours, that installs it.
    """
    return ImportError(f"gradsync.adapters.{extra} needs {library}: pip install 'gradsync[{extra}]'", name=extra)
