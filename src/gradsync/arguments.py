"""Checks arguments of public functions: numbers and addresses.

The checks accept numbers of Python and NumPy, but do not accept True and False as numbers. The command line and every
rank import this file, so it imports very little.
"""

from __future__ import annotations

import operator
import re
from numbers import Real
from typing import Any

from gradsync.errors import InvalidArgument

LARGEST_PORT = 65535
#: Default: how long the ranks have to end, after the launcher has asked them to end, before the launcher kills them.
DEFAULT_GRACE_SECONDS = 5.0
#: Default: how long a rank waits for other ranks at the rendezvous server, for example until all ranks have joined.
DEFAULT_TIMEOUT_SECONDS = 120.0
#: Default: how long a collective waits for a rank.
DEFAULT_COLLECTIVE_TIMEOUT_SECONDS = 300.0


def integer_of(value: object) -> int | None:
    """Returns the value as an int if it is an integer of any library; None for a bool or any other value."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):  # arrays of other libraries may raise ValueError
        return None


def check_integer(who: str, name: str, value: Any, lowest: int, highest: int | None = None) -> int:
    """Checks that a value is an integer in a range, and returns it as an int.

    Args:
        who: the name of the function that got the value, for the error.
        name: the name of the argument that has the value.
        value: the value to check.
        lowest: the smallest allowed value.
        highest: the largest allowed value; None means no limit.

    Raises:
        InvalidArgument: the value is not an integer, or is out of range.
    """
    number = integer_of(value)
    if number is None or number < lowest or (highest is not None and number > highest):
        range_text = f"of at least {lowest}" if highest is None else f"from {lowest} to {highest}"
        raise InvalidArgument(f"{who} needs {name} to be an integer {range_text}, got {value!r}")
    return number


def check_port(who: str, name: str, value: Any) -> int:
    """Checks that a value is a port number, and returns it as an int; 0 means any free port.

    Raises:
        InvalidArgument: the value is not a port number.
    """
    return check_integer(who, name, value, 0, LARGEST_PORT)


def is_number(value: object) -> bool:
    """Returns whether a value is a real number (int, float, Fraction, or a number of NumPy), but not a bool."""
    return isinstance(value, Real) and not isinstance(value, bool)


def check_seconds(who: str, name: str, value: Any) -> None:
    """Checks that a value is a finite number of seconds, 0 or more.

    Raises:
        InvalidArgument: the value is not a finite number of 0 or more.
    """
    if not is_number(value) or not 0 <= value < float("inf"):
        raise InvalidArgument(f"{who} needs {name} to be a number of seconds, 0 or more, got {value!r}")


def parse_address(address: str) -> tuple[str, int]:
    """Splits an address such as "127.0.0.1:4000", "name:4000" or "[::1]:4000" into host and port.

    Raises:
        InvalidArgument: the address is not text, does not have such a form, or its port is not from 1 to 65535.
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
    """Checks that a text is an address with host and port, and returns it.

    Args:
        text: the address; an IPv6 host needs brackets.
        name: the name of the argument or variable that has the address, for the error.

    Raises:
        InvalidArgument: the text is not an address with host and port.
    """
    try:
        parse_address(text)
    except InvalidArgument as error:
        raise InvalidArgument(f"{name}: {error}") from None
    return text


def join_address(host: str, port: int) -> str:
    """Returns the address for a host and a port: the inverse of `parse_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Returns whether a host is "localhost" or a loopback address; False for other names, which are not looked up."""
    names = r"localhost|ip6-localhost|ip6-loopback|::1|(::ffff:)?127(\.[0-9]{1,3}){1,3}"
    return re.fullmatch(names, host, re.IGNORECASE) is not None


def port_beside(port: int) -> int:
    """Returns the rendezvous server's port for a MASTER_PORT: MASTER_PORT + 1, or 65534 if MASTER_PORT is 65535."""
    return port + 1 if port < LARGEST_PORT else port - 1
