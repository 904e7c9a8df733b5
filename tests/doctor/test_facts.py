"""What the doctor finds out about this machine."""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest

from gradsync.doctor import facts
from gradsync.doctor.facts import _host_error


def test_a_name_server_gets_its_time_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: answer.wait(30))
    threading.Timer(0.1, answer.set).start()
    assert _host_error() == ""
    answer.clear()
    monkeypatch.setattr(facts, "_NAME_SECONDS", 0.05)
    assert _host_error() == "the name server did not answer within 0.05 s"
    answer.set()


def test_a_name_without_an_address_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert "Name or service not known" in _host_error()


def test_a_name_that_is_too_long_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "n" * 64)  # Linux allows 64 characters, DNS 63
    assert "label" in _host_error()
