"""Other processes that the launching program forks, or that its surroundings have closed or ignored, do no harm."""

import os
import signal

import pytest

from gradsync.launching.signals import SignalInbox, own_descriptors
from gradsync.rendezvous.client import RendezvousClient
from gradsync.rendezvous.server import RendezvousServer

SECRET = b"s" * 32


def fork_idle_child():
    """Forks a child that does nothing until it is killed, or this process ends; gives its process id."""
    reader, writer = os.pipe()
    lifeline, our_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(our_end)
            os.write(writer, b"!")
            os.read(lifeline, 1)
        finally:
            os._exit(0)
    os.close(writer)
    os.close(lifeline)
    _our_ends[pid] = our_end
    assert os.read(reader, 1) == b"!"  # what is done after a fork has been done
    os.close(reader)
    return pid


_our_ends = {}


def end(pid, number=signal.SIGKILL):
    """Ends an idle child by a signal; gives the one that it has died of."""
    os.kill(pid, number)
    status = os.waitpid(pid, 0)[1]
    os.close(_our_ends.pop(pid))
    return os.WTERMSIG(status)


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_forked_child_has_none_of_our_descriptors():
    reader, writer = os.pipe()
    own_descriptors.add(writer)
    pid = fork_idle_child()
    try:
        own_descriptors.discard(writer)
        os.close(writer)
        assert os.read(reader, 1) == b""  # the end, although the child lives
    finally:
        os.close(reader)
        end(pid)


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_forked_child_keeps_no_rank_waiting_for_the_servers_goodbye():
    with RendezvousServer(1, secret=SECRET) as server:
        client = RendezvousClient.connect(server.address, secret=SECRET, rank=0, world_size=1)
        pid = fork_idle_child()
        try:
            client.close()
            server.stop()
            # The port is free at once: the child holds no copy of the listener.
            port = int(server.address.rpartition(":")[2])
            RendezvousServer(1, secret=SECRET, port=port).stop()
        finally:
            end(pid)


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_forked_child_takes_signals_as_the_program_did():
    previous = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with SignalInbox() as inbox:
            assert end(fork_idle_child(), signal.SIGTERM) == signal.SIGTERM
            assert inbox.read() == []
    finally:
        signal.signal(signal.SIGTERM, previous)
