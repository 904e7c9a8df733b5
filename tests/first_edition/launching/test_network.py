"""By which interface this machine reaches the others."""

from gradsync.launching.job import Network
from gradsync.launching.rank_environment import network_towards


def test_the_way_to_a_host():
    assert network_towards("127.0.0.1", 4000) == network_towards("localhost", 4000) == Network("lo", False)
    assert network_towards("::1", 4000) in (Network("lo", True), None)  # None: no IPv6 here
    assert network_towards("no.such.host.invalid", 4000) is None
