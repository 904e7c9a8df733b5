"""Checks arguments of public functions: numbers, Python's and NumPy's but no bools, and addresses.

The command line and every rank import this file, so it imports very little.
"""

from __future__ import annotations

import operator
import re
from numbers import Real
from typing import Any

from gradsync.errors import InvalidArgument

LARGEST_PORT = 65535
#: Default: how long the ranks have to end once the launcher has asked them to, before it kills them.
DEFAULT_GRACE_SECONDS = 5.0
#: Default: how long a rank waits for others at the rendezvous server, for example until all have joined.
DEFAULT_TIMEOUT_SECONDS = 120.0
#: Default: how long a collective waits for a rank.
DEFAULT_COLLECTIVE_TIMEOUT_SECONDS = 300.0


def integer_of(value: object) -> int | None:
    """Returns an integer of any library as an int; None for a bool, or anything else."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):  # arrays of other libraries may raise ValueError
        return None


def check_integer(who: str, name: str, value: Any, lowest: int, highest: int | None = None) -> int:
    """Returns a value, which must be an integer in a range, as an int.

    Args:
        who: the function that got it, for the error.
        name: the argument.
        value: its value.
        lowest, highest: the range; None means no limit.

    Raises:
        InvalidArgument: it is no integer, or out of range.
    """
    number = integer_of(value)
    if number is None or number < lowest or (highest is not None and number > highest):
        range_text = f"of at least {lowest}" if highest is None else f"from {lowest} to {highest}"
        raise InvalidArgument(f"{who} needs {name} to be an integer {range_text}, got {value!r}")
    return number


def check_port(who: str, name: str, value: Any) -> int:
    """Returns a value, which must be a port number, as an int; 0 means any free port.

    Raises:
        InvalidArgument: it is none.
    """
    return check_integer(who, name, value, 0, LARGEST_PORT)


def is_number(value: object) -> bool:
    """Whether a value is a real number (int, float, Fraction, NumPy's), and no bool."""
    return isinstance(value, Real) and not isinstance(value, bool)


def check_seconds(who: str, name: str, value: Any) -> None:
    """Checks that a value is a finite number of seconds, 0 or more.

    Raises:
        InvalidArgument: it is none.
    """
    if not is_number(value) or not 0 <= value < float("inf"):
        raise InvalidArgument(f"{who} needs {name} to be a number of seconds, 0 or more, got {value!r}")


def parse_address(address: str) -> tuple[str, int]:
    """Splits an address such as "127.0.0.1:4000", "name:4000" or "[::1]:4000" into host and port.

    Raises:
        InvalidArgument: it is not text of such a form, or its port is not from 1 to 65535.
    """
    if not isinstance(address, str):
        raise InvalidArgument(f"an address needs to be text, got {type(address).__name__}")
    host, colon, port_text = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if bracketed:
        host = host[1:-1]
    valid_port = re.fullmatch("[0-9]{1,5}", port_text) is not None and 0 < int(port_text) <= LARGEST_PORT
    if not colon or not host or not valid_port or (":" in host and not bracketed):
        raise InvalidArgument(
            f"an address needs the form host:port or [IPv6]:port with a port from 1 to {LARGEST_PORT}, got {address!r}"
        )
    return host, int(port_text)


def check_address(text: str, name: str = "address") -> str:
    """Returns an address, which must have host and port.

    Args:
        text: the address; an IPv6 host needs brackets.
        name: the argument or variable that has it, for the error.

    Raises:
        InvalidArgument: it is no address with host and port.
    """
    try:
        parse_address(text)
    except InvalidArgument as error:
        raise InvalidArgument(f"{name}: {error}") from None
    return text


def join_address(host: str, port: int) -> str:
    """Returns the address of a host and a port: the inverse of `parse_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether a host is "localhost" or a loopback address; other names are not looked up."""
    names = r"localhost|ip6-localhost|ip6-loopback|::1|(::ffff:)?127(\.[0-9]{1,3}){1,3}"
    return re.fullmatch(names, host, re.IGNORECASE) is not None
