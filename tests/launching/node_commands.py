"""Several launchers of one run, each a node, started as a user would on so many machines."""

import contextlib
import os
import secrets
import subprocess
import sys

import command

# Meets the others through the ranks' rendezvous, and then does as it is told.
SCRIPT = """
import os, signal, sys, time
from gradsync.rendezvous.hosting import join
from gradsync.environment import read_environment

place = read_environment()
client, _ = join(place, None, 60)
if client.rank == 0:
    client.set("id", os.urandom(128))
unique_id = client.get("id", from_rank=0)
print("id", unique_id.hex()[:12], *(os.environ.get(name) for name in sys.argv[2:]), flush=True)
client.barrier("begun")
what, _, who = sys.argv[1].partition("@")
if what == "fail":
    if int(who) == place.rank:
        raise ValueError("boom")
    client.barrier("never")
if what == "busy":
    if who and int(who) == place.rank:
        raise ValueError("boom")
    time.sleep(100)
if what == "linger" and int(who) == place.rank:
    time.sleep(1.5)
if what == "wait":
    while True:
        client.check()
        signal.sigtimedwait([], 0.02)
client.close()
"""


def write(folder):
    """Writes the script and a secret; gives their paths."""
    secret = folder / "secret"
    secret.write_text(secrets.token_hex(32))
    secret.chmod(0o600)
    return command.write_script(folder, SCRIPT), str(secret)


def arguments(node, nnodes, rendezvous, secret, *options, ranks=1):
    """The arguments of one node's `gradsync run`, up to the script."""
    place = ("--nnodes", nnodes, "--node-rank", node, "--rendezvous", rendezvous, "--secret-file", secret)
    return ("run", "-n", ranks, *place, *options)


class Nodes:
    """The launchers of one run, on this machine or on others.

    Args:
        folder: for the script.
        rendezvous: host:port.
        machines: where each runs; all on this one by default.
    """

    def __init__(self, folder, rendezvous, nnodes, machines=None):
        self.script, self.secret = write(folder)
        self.rendezvous, self.nnodes, self.machines = rendezvous, nnodes, machines
        self.processes = [None] * nnodes

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            if process is not None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                process.communicate()

    def start(self, node, *script_arguments, options=(), ranks=1):
        """Starts the launcher of one node."""
        line = arguments(node, self.nnodes, self.rendezvous, self.secret, *options, ranks=ranks)
        line = (*line, self.script, *script_arguments)
        if self.machines is None:
            process = command.start(*line)
        else:
            program = (sys.executable, "-c", command._START)
            process = self.machines[node].start(*program, *map(str, line), env=dict(os.environ))
        self.processes[node] = process

    def start_all(self, *script_arguments, options=(), ranks=1):
        for node in range(self.nnodes):
            self.start(node, *script_arguments, options=options, ranks=ranks)

    def await_ids(self, node, count=1):
        """Gives the words after "id" of so many ranks of a node, once they have told them."""
        found = []
        while len(found) < count:
            line = self.processes[node].stdout.readline()
            assert line, self.processes[node].stderr.read()
            if "] id " in line:
                found.append(line.split("] id ")[1].split())
        return found

    def end(self, node, timeout=60):
        """Waits for a launcher; gives its exit code and what it printed on stderr."""
        process = self.processes[node]
        _, err = process.communicate(timeout=timeout)
        return process.returncode, err

    def end_all(self):
        try:
            return [self.end(node) for node in range(self.nnodes)]
        except subprocess.TimeoutExpired:
            for process in self.processes:
                process.kill()
            raise AssertionError([process.communicate() for process in self.processes]) from None
