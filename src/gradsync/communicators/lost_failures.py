"""Failures of asynchronous collectives that nobody has asked for: they are logged in the end, as asyncio does it."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from typing import TYPE_CHECKING

from gradsync.errors import describe, uncaught_error

if TYPE_CHECKING:
    from gradsync.communicators.lifetime import Lifetime

_log = logging.getLogger("gradsync")


class LostFailure:
    """One failure, as long as its future has it: logged when that goes, unless it was told before.

    Args:
        name: how error messages call the collective.
        error: what ended it.
        lifetime: of its communicator, at whose close it is logged.
    """

    __slots__ = ("__weakref__", "_lifetime", "_text")

    def __init__(self, name: str, error: BaseException, lifetime: Lifetime) -> None:
        self._lifetime = weakref.ref(lifetime)
        self._text = "" if _is_ending else f"{name} has failed, and nobody has asked its future: {describe(error)}"
        with _registering:
            _all.add(self)
        _register_exit()

    def forget(self) -> None:
        """Somebody has been told."""
        self._text = ""

    def tell(self) -> None:
        """Logs it, once; not where the program ends with an exception: then there is better to tell."""
        text, self._text = self._text, ""
        if text and uncaught_error() is None:
            _log.error("%s", text)

    def is_of(self, lifetime: Lifetime) -> bool:
        """Whether it is one of that communicator."""
        return self._lifetime() is lifetime

    def __del__(self) -> None:
        self.tell()


_all: weakref.WeakSet[LostFailure] = weakref.WeakSet()
_registering = threading.Lock()  # a set must not grow while another thread goes through it
_is_registered = False
_is_ending = False  # the program has left what is under way to itself


def tell_lost(lifetime: Lifetime | None = None) -> None:
    """Logs the failures that nobody has asked for: on one communicator, or on all."""
    if _all:
        with _registering:
            lost = list(_all)
        for failure in lost:
            if lifetime is None or failure.is_of(lifetime):
                failure.tell()


def tell_lost_at_exit() -> None:
    """Logs those of the program that ends here; what its end makes fail is no news."""
    global _is_ending
    tell_lost()
    _is_ending = True


def _register_exit() -> None:
    global _is_registered
    if not _is_registered:
        _is_registered = True
        atexit.register(tell_lost_at_exit)


def _forget_after_fork() -> None:
    """They are the parent's to tell."""
    global _registering
    _registering = threading.Lock()
    for failure in list(_all):
        failure.forget()


os.register_at_fork(after_in_child=_forget_after_fork)
