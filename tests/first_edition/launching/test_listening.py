import socket

import pytest

from gradsync.errors import RendezvousError
from gradsync.launching.hosting import own_listener
from gradsync.launching.signals import own_descriptors


def test_a_listener_is_this_process_s_own_while_it_lasts():
    before = set(own_descriptors)
    with pytest.raises(ZeroDivisionError), own_listener("127.0.0.1", 0) as listener:
        assert own_descriptors - before == {listener.fileno()}
        socket.create_connection(listener.getsockname(), 10).close()
        _ = 1 / 0
    assert own_descriptors == before
    assert listener.fileno() == -1


def test_a_port_that_is_taken_leaves_nothing():
    before = set(own_descriptors)
    with (
        own_listener("127.0.0.1", 0) as listener,
        pytest.raises(RendezvousError, match="is in use"),
        own_listener("127.0.0.1", listener.getsockname()[1]),
    ):
        pass
    assert own_descriptors == before
