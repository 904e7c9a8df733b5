"""The addresses of this machine as the kernel gives them, against those that `ip` shows.

Private names: what other machines are given, and what is warned about, follows from these; one machine shows neither.
"""

from __future__ import annotations

import ipaddress
import subprocess

import pytest

from gradsync import machine
from gradsync.machine import interface_of, own_addresses


def test_every_address_of_this_machine_has_its_interface() -> None:
    try:
        listed = subprocess.run(["ip", "-o", "address"], capture_output=True, text=True, check=True).stdout
    except OSError as error:
        pytest.skip(f"no ip command to compare with: {error}")
    seen: dict[str, set[str]] = {}
    for line in listed.splitlines():
        _, name, _, address, *_ = line.split()
        seen.setdefault(str(ipaddress.ip_interface(address).ip), set()).add(name)
    assert seen
    for address, names in seen.items():
        assert interface_of(address) in names
    for address in ("127.3.2.1", "::1", "::ffff:127.0.0.1"):
        assert interface_of(address) == "lo"
    assert interface_of("192.0.2.123") is interface_of("2001:db8::1") is None


def test_other_machines_get_addresses_that_only_this_one_has(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [("lo", "127.0.0.1"), ("ib0", "2001:db8::7"), ("eth0", "192.0.2.7"), ("eth0", "fe80::7")]
    found += [("docker0", "172.17.0.1")]
    packed = [(name, ipaddress.ip_address(address).packed) for name, address in found]
    monkeypatch.setattr(machine, "addresses", lambda: iter(packed))
    assert own_addresses() == ["192.0.2.7", "2001:db8::7"]
