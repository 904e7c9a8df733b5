"""What docs/security.md says of networks where others can listen: what they read, and what keeps them out."""

import contextlib
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import namespaces
import pytest
from node_commands import Nodes, write

_WHY_NOT = namespaces.why_none()
pytestmark = pytest.mark.skipif(_WHY_NOT is not None, reason=str(_WHY_NOT))
SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
needs_sshd = pytest.mark.skipif(SSHD is None, reason="no sshd on this machine")

PAGE = (Path(__file__).parents[3] / "docs" / "security.md").read_text().partition("## Where others can listen")[2]
PRIVATE, SERVE, TUNNEL, EXPORT = re.findall(r"```sh\n(.*?)```", PAGE, flags=re.DOTALL)
PORT, SSH_PORT = 29400, 22
_RCVBUFFORCE = 33  # Linux: root may have more than others
# In place of ssh's two ends: passes on what comes to one address to another.
FORWARD = """
import socket, sys, threading
def pass_on(source, target):
    while data := source.recv(65536):
        target.sendall(data)
    target.shutdown(socket.SHUT_WR)
(host, port), to = sys.argv[1].split(":"), sys.argv[2].split(":")
with socket.create_server((host, int(port))) as listener:
    while True:
        one, other = listener.accept()[0], socket.create_connection(to)
        for ends in ((one, other), (other, one)):
            threading.Thread(target=pass_on, args=ends, daemon=True).start()
"""


@pytest.fixture
def network():
    with namespaces.machines(2) as machines:
        yield machines


class Listener:
    """Hears all that goes to a machine, and from it, on the network that it shares with others."""

    def __init__(self, machine):
        self._stream = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
        self._stream.setsockopt(socket.SOL_SOCKET, _RCVBUFFORCE, 2**24)
        self._stream.bind((machine.port, 0))
        self._stream.setblocking(False)

    def heard(self):
        """Returns the ports of all TCP connections, and all bytes."""
        ports, text = set(), b""
        with self._stream, contextlib.suppress(BlockingIOError):
            while True:
                frame = self._stream.recv(2**16)
                if frame[12:14] == b"\x08\x00" and frame[23] == socket.IPPROTO_TCP:
                    ports.update(struct.unpack_from("!HH", frame, 14 + 4 * (frame[14] & 15)))
                text += frame
        return ports, text


def meet(machines, folder, address):
    """Runs a launcher on each machine; returns the id by which NCCL's communicators would be joined."""
    with Nodes(folder, address, 2, machines) as run:
        run.start_all("none", "NCCL_SOCKET_IFNAME")
        found = [run.await_ids(node)[0] for node in range(2)]
        ends = run.end_all()
    assert [code for code, _ in ends] == [0, 0], ends
    assert found[0] == found[1]
    return bytes.fromhex(found[0][0]), found[0][1]


def test_who_listens_reads(network, tmp_path):
    listener = Listener(network[1])
    unique_id, interface = meet(network, tmp_path, f"{network[0].ipv4}:{PORT}")
    ports, text = listener.heard()
    assert interface == "=eth0"
    assert PORT in ports
    assert unique_id in text


def test_a_private_network(network, tmp_path):
    [address] = re.findall(r"--rendezvous (\S+)", PRIVATE)
    names = [machine.name for machine in network]
    link = ("link", "add", "private", "netns", names[0], "type", "veth", "peer", "name", "private", "netns", names[1])
    namespaces._ip(*link)
    for number, name in enumerate(names):
        namespaces._ip("-n", name, "addr", "add", f"10.78.0.{number + 1}/24", "dev", "private")
        namespaces._ip("-n", name, "link", "set", "private", "up")
    listener = Listener(network[1])
    unique_id, interface = meet(network, tmp_path, address)
    ports, text = listener.heard()
    assert interface == "=private"
    assert not ports
    assert unique_id not in text


@contextlib.contextmanager
def running(machine, *command, **options):
    """Runs a program on a machine; what it leaves behind ends with the network."""
    process = machine.start(*command, **options)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


def await_listening(machine, port):
    deadline = time.monotonic() + 30
    while f":{port} " not in namespaces._ip("netns", "exec", machine.name, "ss", "-ltnH"):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def run_ranks(machines, folder):
    """Runs the server, and a rank on each machine as torchrun would; returns the id that they agree on."""
    script, secret = write(folder)
    shutil.copy(secret, folder / "gradsync.secret")
    told = subprocess.run(
        ["sh", "-ec", f"{EXPORT}\nenv"], cwd=folder, capture_output=True, text=True, check=True
    ).stdout
    exported = dict(line.split("=", 1) for line in told.splitlines() if line.startswith("GRADSYNC_"))
    processes = []
    serve = SERVE.replace("gradsync ", f"exec {sys.executable} -m gradsync ", 1)
    with running(machines[0], "sh", "-ec", serve, cwd=folder):
        await_listening(machines[0], PORT)
        for rank, machine in enumerate(machines):
            place = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            env = os.environ | place | exported
            processes.append(machine.start(sys.executable, script, "none", env=env))
        told = [process.communicate(timeout=100) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], told
    ids = {out.split()[1] for out, _ in told}
    assert len(ids) == 1, told
    return bytes.fromhex(ids.pop())


def test_a_forwarded_port_is_enough(network, tmp_path):
    """The tunnel without its encryption: a listener hears the port of the tunnel alone, but can read."""
    here, between = f"127.0.0.1:{PORT}", f"{network[0].ipv4}:{SSH_PORT}"
    forward = (sys.executable, "-c", FORWARD)
    with running(network[0], *forward, between, here), running(network[1], *forward, here, between):
        await_listening(network[0], SSH_PORT)
        await_listening(network[1], PORT)
        listener = Listener(network[1])
        unique_id = run_ranks(network, tmp_path)
    ports, text = listener.heard()
    assert SSH_PORT in ports
    assert PORT not in ports
    assert unique_id in text


@needs_sshd
def test_an_ssh_tunnel(network, tmp_path):
    """The commands of the page, with keys and a name for node0 that are the test's."""
    for name in ("host_key", "key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / name], check=True)
    server = {"HostKey": "host_key", "AuthorizedKeysFile": "key.pub", "PidFile": "pid"}
    options = [f"{key} {tmp_path / value}" for key, value in server.items()]
    (tmp_path / "sshd.conf").write_text("\n".join([*options, "StrictModes no", "PermitRootLogin yes", "UsePAM no\n"]))
    client = f"Hostname {network[0].ipv4}\nIdentityFile {tmp_path / 'key'}\nUserKnownHostsFile {tmp_path / 'known'}\n"
    (tmp_path / "ssh.conf").write_text(f"Host node0\n{client}StrictHostKeyChecking accept-new\n")
    dig = TUNNEL.replace("ssh ", f"ssh -F {tmp_path / 'ssh.conf'} ", 1)
    with running(network[0], SSHD, "-D", "-e", "-f", tmp_path / "sshd.conf"):
        await_listening(network[0], SSH_PORT)
        listener = Listener(network[1])
        with running(network[1], "sh", "-ec", dig) as tunnel:
            assert tunnel.wait(timeout=60) == 0, tunnel.stderr.read()
            unique_id = run_ranks(network, tmp_path)
    ports, text = listener.heard()
    assert SSH_PORT in ports
    assert PORT not in ports
    assert unique_id not in text
