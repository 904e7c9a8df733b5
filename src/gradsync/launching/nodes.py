"""A run on several machines: one launcher on each machine; the launchers start, end and restart the ranks together.

Node 0 hosts one server, for the launchers and for their ranks. Each start of the ranks has four steps:

1. All launchers join at the server, again for each start, and exchange their records (`_NodeRun._join`). If the server
   has lost a launcher, and the user has started this launcher again, this launcher takes part in the next start.
2. Each launcher starts its ranks and watches them (`Supervisor`).
3. The first launcher whose ranks fail, or that gets a signal, sets the key "cause" on the server. All launchers read
   this key, and end their ranks (`_Link`).
4. When its ranks have ended, each launcher waits until the ranks of all machines have ended. Launchers that know the
   same cause return the same exit code, or start the ranks again together.

If a launcher dies, or its machine loses its network, the server reports this to the other launchers. Threads wait for
messages from the other launchers. To wake the supervisor's loop, such a thread puts a number into the `SignalInbox`,
like a signal. So the loop never waits for the network.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from types import FrameType, TracebackType
from typing import NamedTuple, NoReturn

from gradsync.arguments import DEFAULT_TIMEOUT_SECONDS, check_seconds, parse_address
from gradsync.environment import (
    HOW_TO_MAKE_A_SECRET_FILE,
    SECRET_FILE,
    check_variables,
    read_secret_option,
    take_secret,
)
from gradsync.errors import (
    AuthenticationError,
    CommunicatorClosed,
    GradsyncError,
    InvalidArgument,
    RankFailed,
    RendezvousError,
    RendezvousTimeout,
    describe,
)
from gradsync.launching.free_port import reserved_port
from gradsync.launching.hosting import own_address
from gradsync.launching.in_rank.result import from_json, to_json
from gradsync.launching.job import Job
from gradsync.launching.outcome import Outcome, cause_text, failure_text, lines_on_others, signal_name
from gradsync.launching.output import REPORT_SECONDS, Notices
from gradsync.launching.signals import FAILED_ELSEWHERE, SignalInbox
from gradsync.launching.supervisor import MakeOutput, Supervisor
from gradsync.machine import interface_of
from gradsync.rendezvous.client import RendezvousClient
from gradsync.rendezvous.frames import MAX_RANKS
from gradsync.rendezvous.secret_files import Endpoint
from gradsync.rendezvous.server import RendezvousServer
from gradsync.rendezvous.sockets import ConnectionLost, bind_listener

# Less than the 5 s between the server's notices: otherwise the server could report a launcher as missing that is about
# to connect again.
_JOIN_NOTICE_SECONDS = 4.0
_RETRY_SECONDS = 0.5
_EXCHANGE_SECONDS = 30.0  # how long to wait for the records of all launchers that have joined
_LEAVING_SECONDS = 5.0  # how long node 0 waits until the other launchers have left, at the end
_LEAVING_AFTER_LOSS_SECONDS = 0.5
_CAUSE_SECONDS = 1.0  # how long a launcher waits for another launcher's cause, if its ranks failed because of others
# How long, besides the grace period, a launcher waits for the others after a failure; killing ranks takes less time. A
# launcher whose terminal is blocked does not end before somebody reads its output.
_ENDS_SECONDS = 60.0
_NO_LIMIT_SECONDS = 1e8  # no limit is needed: heartbeats detect a launcher that is gone
_MAX_CAUSE_BYTES = 60 * 1024  # the largest value on the server
_START_BYTES = 8
_SAME_VERSION = "run the same version of gradsync on every machine"


# -- Options -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NodeOptions:
    """This machine's options in a run on several machines; made by `check_node_options`.

    Attributes:
        nnodes: the number of machines.
        node_rank: the number of this machine, from 0.
        rendezvous: host:port of the rendezvous server, as the user wrote it.
        secret: the secret of the run.
        join_timeout_seconds: how long a launcher waits until the other launchers have joined.
        node_address: this machine's address, if the user gave an address; otherwise None.
    """

    nnodes: int
    node_rank: int
    rendezvous: str
    secret: bytes = field(repr=False)
    join_timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS
    node_address: str | None = None

    @property
    def name(self) -> str:
        """The name of this node in messages."""
        return f"node {self.node_rank} of {self.nnodes}"


def check_node_options(
    nnodes: int | None,
    node_rank: int | None,
    rendezvous: str | None,
    secret_file: str | None,
    join_timeout_seconds: float,
    node_address: str | None,
) -> NodeOptions | None:
    """Returns the options of a run on several machines; None for a run on one machine.

    Raises:
        InvalidArgument: an option is missing, malformed or out of its range, or allowed only for several machines; or
            the secret cannot be read.
    """
    if nnodes is None:
        given = {
            "--node-rank": node_rank,
            "--rendezvous": rendezvous,
            "--secret-file": secret_file,
            "--node-address": node_address,
        }
        option = next(option for option, value in given.items() if value is not None)
        raise InvalidArgument(f"{option} needs --nnodes, the number of machines")
    if node_rank is not None and node_rank >= nnodes:
        raise InvalidArgument(f"--node-rank needs to be from 0 to {nnodes - 1} with --nnodes {nnodes}, got {node_rank}")
    if nnodes == 1:
        return None
    check_seconds("gradsync run", "--join-timeout", join_timeout_seconds)
    if nnodes > MAX_RANKS:
        raise InvalidArgument(f"--nnodes needs to be at most {MAX_RANKS}, got {nnodes}")
    if node_rank is None:
        raise InvalidArgument(f"--nnodes {nnodes} needs --node-rank, this machine's number from 0 to {nnodes - 1}")
    if rendezvous is None:
        raise InvalidArgument(
            f"--nnodes {nnodes} needs --rendezvous HOST:PORT, the same on every machine: an address of the machine "
            "with --node-rank 0, and a port that is free there"
        )
    try:
        host, _ = parse_address(rendezvous)
    except InvalidArgument as error:
        raise InvalidArgument(f"--rendezvous: {error}") from None
    _check_particular("--rendezvous", host, host)
    if node_address is not None:
        _check_particular("--node-address", node_address, node_address)
    secret = take_secret() if secret_file is None else read_secret_option(secret_file)
    if secret is None:
        raise InvalidArgument(
            f"--nnodes {nnodes} needs --secret-file (or {SECRET_FILE}), so that nobody else can join the run: make one "
            f"with: {HOW_TO_MAKE_A_SECRET_FILE}, and copy it to every machine"
        )
    return NodeOptions(nnodes, node_rank, rendezvous, secret, join_timeout_seconds, node_address)


def _check_particular(option: str, given: str, address: str) -> None:
    """Raises InvalidArgument for an address that belongs to no particular machine, such as 0.0.0.0.

    Args:
        option: the name of the option, for the error.
        given: the value of the option, for the error.
        address: the IP address of the host `given`; `given` itself if the address is not known.
    """
    try:
        known = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:  # the address is a name
        return
    if known.is_unspecified or (known.version == 6 and known.is_link_local):
        shown = repr(given) if given == address else f"{given!r} ({address})"
        raise InvalidArgument(
            f"{option} needs an address of one particular machine, by which the other machines reach it, got {shown}"
        )


# -- Messages between launchers ----------------------------------------------------------------------------------------


class NodeRecord(NamedTuple):
    """The record that a launcher sends to the other launchers before each start of the ranks.

    Attributes:
        node: the number of the launcher's machine.
        host: the machine's host name.
        address: the address by which the other machines reach this machine.
        n_ranks: the number of ranks that the launcher starts.
        restart: the number of restarts so far, as far as this launcher knows; 0 at the first start.
        max_restarts: the limit of restarts.
        master_port: the value of MASTER_PORT. All launchers use the `master_port` of node 0.
        start: a random name for this start of the ranks. All launchers use the name from node 0.
    """

    node: int
    host: str
    address: str
    n_ranks: int
    restart: int
    max_restarts: int
    master_port: int
    start: str

    @property
    def name(self) -> str:
        """The name of this node in messages."""
        return f"node {self.node} ({self.host}, {self.address})"


class Cause(NamedTuple):
    """The reason why the ranks of all machines end: a failure or a signal on one machine.

    Attributes:
        node: the machine's number.
        how: the event on the node, in words that follow the node's name, such as "was ended by SIGTERM".
        text: the report on the rank that failed; "" if no rank is the cause.
        exit_code: the exit code of all launchers.
        may_retry: whether the ranks may be started again.
        is_lost: whether the node's launcher is gone.
        is_consequence: whether the failure only reports that another rank is gone.
    """

    node: int
    how: str
    text: str
    exit_code: int
    may_retry: bool = True
    is_lost: bool = False
    is_consequence: bool = False

    def to_bytes(self) -> bytes:
        """Returns the cause as bytes; leaves out the beginning of a long text, because the failure comes last."""
        cause = self
        while len(data := to_json(cause)) > _MAX_CAUSE_BYTES:
            rest = cause.text[len(cause.text) // 2 :].partition("\n")[2]
            cause = cause._replace(text=f"gradsync: (the beginning of this report is left out)\n{rest}")
        return data

    @classmethod
    def from_bytes(cls, data: bytes, reader: int) -> Cause:
        """Returns the cause that a launcher has sent. If the bytes are invalid, returns a cause that says so.

        Args:
            data: the cause as bytes.
            reader: the number of the machine that reads the cause.
        """
        try:
            return from_json(cls, data)
        except ValueError as error:
            how = f"cannot read why another node ended the run: {error}; {_SAME_VERSION}"
            return cls(reader, how, "", 1, may_retry=False)


def cause_of(node: int, outcome: Outcome) -> Cause:
    """Returns the cause that a machine reports when its ranks fail, or when its launcher gets a signal."""
    if outcome.signal_number is not None:
        return signal_cause(node, outcome.signal_number)
    root = outcome.root_cause
    is_consequence = root is not None and root.error is not None and root.error.is_consequence
    return Cause(node, "failed", cause_text(outcome), outcome.exit_code, is_consequence=is_consequence)


def signal_cause(node: int, number: int) -> Cause:
    """Returns the cause that a launcher reports when it gets a signal."""
    return Cause(node, f"was ended by {signal_name(number)}", "", 128 + number, may_retry=False)


def decode_record(node: int, data: bytes) -> NodeRecord:
    """Decodes the record that another launcher has sent.

    Raises:
        RendezvousError: the bytes are no record.
    """
    try:
        return from_json(NodeRecord, data)
    except ValueError as error:
        raise RendezvousError(f"the record of node {node} cannot be read: {error}; {_SAME_VERSION}") from None


# -- The run -----------------------------------------------------------------------------------------------------------


def run_on_nodes(options: NodeOptions, job: Job, make_output: MakeOutput, notices: Notices) -> int:
    """Runs this machine's ranks in a run on several machines.

    Args:
        options: this machine's options in the run.
        job: the job of this machine, without the ranks of the other machines.
        make_output: see `supervise`.
        notices: the object that prints the launcher's notices.

    Returns:
        The exit code: 0 if no rank failed, otherwise the exit code of the cause, see `Cause`.

    Raises:
        BackendUnavailable: the system allows no more processes or open files.
        InvalidArgument: the options do not fit this machine, or differ from the options on another machine.
        AuthenticationError, RendezvousError, RendezvousTimeout: the launchers could not join each other.
    """
    # Without a handler, these signals would end the launcher immediately while it waits for other launchers. Its files,
    # such as the temporary state directory, would remain.
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:  # the signal is not ignored, as it is under nohup
            signal.signal(number, _exit)
    try:
        with _hosting(options, notices) as server:
            return _NodeRun(options, job, make_output, notices, server).run()
    except (KeyboardInterrupt, SystemExit) as error:
        notices.print(f"gradsync: {options.name} {_cause_of_exit(options.node_rank, error).how}")
        raise


def _exit(number: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


@contextlib.contextmanager
def _hosting(options: NodeOptions, notices: Notices) -> Iterator[RendezvousServer | None]:
    """On node 0, runs and yields the server of the launchers and the ranks; on other nodes, yields None.

    Raises:
        InvalidArgument: the address in --rendezvous belongs to no particular machine.
        RendezvousError: the address does not belong to this machine, or the port is taken.
    """
    if options.node_rank != 0:
        yield None
        return
    host, port = parse_address(options.rendezvous)
    with contextlib.ExitStack() as stack:
        try:
            another = "name another port in --rendezvous, on every machine"
            listener = stack.enter_context(bind_listener(options.node_address or host, port, if_taken=another))
        except RendezvousError as error:
            is_taken = isinstance(error.__context__, OSError) and error.__context__.errno == errno.EADDRINUSE
            advice = (
                "; node 0 hosts the rendezvous server: start node 0 on the machine with the address "
                f"{options.rendezvous!r}, or give an address of this machine with --node-address"
            )
            raise RendezvousError(f"{options.name}: {error}{'' if is_taken else advice}") from None
        if options.node_address is None:
            _check_reachable(host, listener.getsockname()[0], notices)
        server = RendezvousServer(options.nnodes, secret=options.secret, listener=listener, of_launchers=True)
        yield stack.enter_context(server)


def _check_reachable(host: str, address: str, notices: Notices) -> None:
    """Checks the address of the host in --rendezvous, as this machine resolves it.

    Raises:
        InvalidArgument: the address belongs to no particular machine.
    """
    _check_particular("--rendezvous", host, address)
    if host not in ("localhost", address) and ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        notices.print(
            f"gradsync: warning: on this machine {host!r} has the address {address}, which no other machine can reach; "
            "give another address in --rendezvous, or an address of this machine with --node-address"
        )


class _NodeRun:
    """One run on several machines: starts this machine's ranks, and restarts them after failures."""

    def __init__(
        self,
        options: NodeOptions,
        job: Job,
        make_output: MakeOutput,
        notices: Notices,
        server: RendezvousServer | None,
    ) -> None:
        self._options = options
        self._job = job
        self._make_output = make_output
        self._notices = notices
        self._server = server
        self._address = options.rendezvous if server is None else server.address
        self._restart = 0  # the number of restarts of the run, as far as this launcher knows

    def run(self) -> int:
        """Starts the ranks, and restarts them after failures, as often as the job allows; returns the exit code."""
        while True:
            cause, report, may_retry = self._run_start()
            if cause is None or not may_retry or self._restart >= self._job.max_restarts:
                if cause is not None:
                    self._notices.print(report, wait_seconds=None)
                if self._server is not None:  # wait until the other launchers have left
                    is_lost = cause is not None and cause.is_lost
                    self._server.wait_until_empty(_LEAVING_AFTER_LOSS_SECONDS if is_lost else _LEAVING_SECONDS)
                return 0 if cause is None else cause.exit_code
            self._notices.print(report, wait_seconds=REPORT_SECONDS)
            self._restart += 1
            how_often = f"restart {self._restart} of at most {self._job.max_restarts}"
            when = f", once node {cause.node} is back" if cause.is_lost else ""
            self._notices.print(f"gradsync: starting all ranks again{when} ({how_often})")

    def _run_start(self) -> tuple[Cause | None, str, bool]:
        """Starts the ranks once, and waits until they have ended.

        Returns:
            The cause of the ranks' end, or None if no rank failed; the text to print; and whether the launcher may
            start the ranks again.
        """
        with contextlib.ExitStack() as stack:
            master_port = 0 if self._server is None else stack.enter_context(reserved_port())
            client, nodes = self._join(master_port)
            own = nodes[self._options.node_rank]
            # If the user has started a lost launcher again, this launcher counts its restarts from 0.
            self._restart = max(record.restart for record in nodes)
            link = stack.enter_context(_Link(client, own.node, self._job.grace_seconds + _ENDS_SECONDS))
            job = self._job_of(own, nodes)
            outcome = None
            try:
                with SignalInbox() as signals:
                    link.watch(signals)
                    with Supervisor(
                        job,
                        signals,
                        make_output=self._make_output,
                        notices=self._notices,
                        restart=self._restart,
                        server=client,
                        on_ending=link.report,
                    ) as supervisor:
                        supervisor.start()
                        outcome = supervisor.finish()
                cause = link.wait_for_ends(outcome)
            except (KeyboardInterrupt, SystemExit) as error:  # a signal, while the ranks of the other nodes still run
                if outcome is None:
                    raise
                cause = self._interrupt(link, own.node, outcome, error)
        if cause is None:
            return None, "", False
        is_here = cause.node == own.node and not cause.is_lost
        text = failure_text(outcome) if is_here and cause.text else cause.text
        before = "" if is_here else lines_on_others(outcome.ranks)
        late = "".join(
            f"gradsync: {nodes[node].name} has not ended {link.limit_seconds:g} s after this failure; perhaps its "
            "terminal is blocked\n"
            for node in link.late_nodes
        )
        report = f"{late}{before}gradsync: {nodes[cause.node].name} {cause.how}{':' if text else ''}\n{text}"
        return cause, report.rstrip("\n"), cause.may_retry and all(rank.exit_code is not None for rank in outcome.ranks)

    def _interrupt(self, link: _Link, node: int, outcome: Outcome, error: KeyboardInterrupt | SystemExit) -> Cause:
        """Ends the ranks of the other nodes after a signal, and waits for their end; a second signal ends the wait."""
        cause = _cause_of_exit(node, error)
        if outcome.signal_number is not None:  # this is the second signal
            return cause
        self._notices.print("gradsync: stopping the ranks of the other nodes (Ctrl-C again leaves at once)")
        try:
            link.set_cause(cause)
            return link.wait_for_ends(outcome) or cause
        except (KeyboardInterrupt, SystemExit) as again:
            return _cause_of_exit(node, again)

    def _join(self, master_port: int) -> tuple[RendezvousClient, tuple[NodeRecord, ...]]:
        """Waits until all launchers have joined, exchanges their records, and begins a start of the ranks.

        Returns:
            This launcher's connection to the server, and the records of all launchers, in the order of the nodes.

        Raises:
            RendezvousTimeout: not all launchers joined in time; the text names the missing launchers.
            AuthenticationError: the secrets differ.
            RendezvousError: the rendezvous server refused this launcher, or is gone.
            InvalidArgument: the options of the launchers differ, or an environment variable has an invalid value.
        """
        options = self._options
        check_variables()  # the supervisor does this too, but only after all launchers have joined
        address = None if options.node_address is None else own_address(options.node_address)
        if options.node_address is not None and address is None:
            raise InvalidArgument(
                f"--node-address {options.node_address!r} is no address of this machine; see: ip address"
            )
        deadline = time.monotonic() + options.join_timeout_seconds
        while True:
            left_seconds = max(deadline - time.monotonic(), 0.0)
            try:
                client = RendezvousClient.connect(
                    self._address,
                    secret=options.secret,
                    rank=options.node_rank,
                    world_size=options.nnodes,
                    # On node 0 the server prints the missing launchers.
                    timeout_seconds=min(left_seconds, _JOIN_NOTICE_SECONDS) if options.node_rank else left_seconds,
                    noun="node",
                )
                return client, self._exchange_records(client, address or client.own_host, master_port)
            except AuthenticationError as error:
                raise AuthenticationError(f"{error}; --secret-file needs the same secret on every machine") from None
            except RendezvousTimeout as error:
                reason = f"missing: {error.missing or f'node 0 ({error.cause or error})'}"
            except RankFailed as error:
                reason = f"a node failed while others joined ({error})"
                time.sleep(_RETRY_SECONDS)
            except RendezvousError as error:
                if not self._restart and not isinstance(error.__cause__, ConnectionLost):
                    raise RendezvousError(f"{error} (see --nnodes, --node-rank, --rendezvous)") from None
                reason = str(error)
                time.sleep(_RETRY_SECONDS)
            if time.monotonic() + _RETRY_SECONDS >= deadline:
                raise RendezvousTimeout(
                    f"{options.name}: not all nodes joined at {options.rendezvous} within "
                    f"{options.join_timeout_seconds:g} s (--join-timeout): {reason}"
                )
            self._notices.print(f"gradsync: {options.name} waits for others at {options.rendezvous}: {reason}")

    def _exchange_records(self, client: RendezvousClient, address: str, master_port: int) -> tuple[NodeRecord, ...]:
        """Returns the records of all launchers, in the order of the nodes, and begins a start of the ranks."""
        own = NodeRecord(
            node=self._options.node_rank,
            host=socket.gethostname(),
            address=address,
            n_ranks=self._job.n_ranks,
            restart=self._restart,
            max_restarts=self._job.max_restarts,
            master_port=master_port,
            start=os.urandom(_START_BYTES).hex(),
        )
        try:
            records = client.exchange("nodes", to_json(own), timeout_seconds=_EXCHANGE_SECONDS)
            nodes = tuple(decode_record(i, data) for i, data in enumerate(records))
            self._check_nodes(nodes)
            # All launchers have joined. If one of them has failed since, that is a failure of this start.
            with contextlib.suppress(RankFailed):
                client.begin_start(nodes[0].start, sum(record.n_ranks for record in nodes))
            return nodes
        except InvalidArgument:
            client.close()
            raise
        except BaseException as error:
            client.report_failure(describe(error))
            client.abandon()
            raise

    def _check_nodes(self, nodes: tuple[NodeRecord, ...]) -> None:
        """Raises InvalidArgument if the launchers' options differ, or do not fit the number of ranks."""
        for record in nodes:
            if record.max_restarts != nodes[0].max_restarts:
                raise InvalidArgument(
                    f"all machines need the same --max-restarts; node 0 has {nodes[0].max_restarts}, "
                    f"{record.name} {record.max_restarts}"
                )
        world_size, stdin_rank = sum(record.n_ranks for record in nodes), self._job.stdin_rank
        if stdin_rank is not None and stdin_rank >= world_size:
            raise InvalidArgument(f"--stdin needs a rank from 0 to {world_size - 1}, or 'none', got {stdin_rank}")

    def _job_of(self, own: NodeRecord, nodes: tuple[NodeRecord, ...]) -> Job:
        """Returns the job of this machine's ranks in the whole run, and prints which ranks these are."""
        first = nodes[0]
        groups = {
            "GROUP_RANK": str(own.node),
            "GROUP_WORLD_SIZE": str(len(nodes)),
            "TORCHELASTIC_RUN_ID": f"gradsync-{first.start[:8]}",
        }
        job = replace(
            self._job,
            world_size=sum(record.n_ranks for record in nodes),
            rank_start=sum(record.n_ranks for record in nodes[: own.node]),
            master_addr=first.address,
            master_port=first.master_port,
            endpoint=Endpoint(self._address, self._options.secret, first.start),
            own_address=own.address,
            variables={**groups, **self._job.variables},
        )
        ranks = f"rank {job.rank_start}" if job.n_ranks == 1 else f"ranks {job.rank_start} to {job.ranks[-1]}"
        self._notices.print(
            f"gradsync: node {own.node} of {len(nodes)} ({own.host}): {ranks} of {job.world_size}, at {own.address} "
            f"({interface_of(own.address) or 'no interface known'}); rendezvous at {self._options.rendezvous}"
        )
        return job


# -- The end of a start ------------------------------------------------------------------------------------------------


class _Link:
    """This launcher's connection to the other launchers during one start; a context manager that ends the connection.

    Args:
        client: the connection to the server.
        node: the number of this machine.
        limit_seconds: how long to wait at most, after a failure or a signal, until the ranks of all machines have
            ended.

    Attributes:
        limit_seconds: the argument.
        late_nodes: the machines whose launchers were silent at this limit.
    """

    def __init__(self, client: RendezvousClient, node: int, limit_seconds: float) -> None:
        self.limit_seconds = limit_seconds
        self.late_nodes: tuple[int, ...] = ()
        self._client = client
        self._node = node
        self._cause: Cause | None = None
        self._deadline = math.inf  # when the wait for the other launchers ends, once there is a cause

    def __enter__(self) -> _Link:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._client.report_failure(describe(error))
        if self._client.has_failed():
            self._client.abandon()
        else:
            self._client.close()

    def watch(self, signals: SignalInbox) -> None:
        """Makes the supervisor end the ranks when a launcher reports a cause, or is lost; returns immediately."""
        _run_in_thread(lambda: self._wait_for_cause(signals))

    def report(self, outcome: Outcome) -> None:
        """Reports to the other launchers why the ranks on this machine will end; returns immediately."""
        if self._cause is None:
            _run_in_thread(lambda: self._set_cause_of(outcome))

    def wait_for_ends(self, outcome: Outcome) -> Cause | None:
        """Waits until the ranks of all machines have ended, and their output is shown.

        After a failure or a signal on any machine, the wait takes at most `limit_seconds`. Otherwise the wait has no
        limit: heartbeats detect a launcher that is gone.

        Args:
            outcome: how the ranks of this machine ended.

        Returns:
            The cause of the ranks' end; None if no rank failed.
        """
        failed = outcome.exit_code != 0
        with contextlib.suppress(GradsyncError):  # `_loss` returns a failure
            if failed:  # before the report, so that a launcher that reads the report finds the cause
                self._set_cause_of(outcome)
            if any(self._exchange_ends(b"failed" * failed)):
                self._learn(self._client.get("cause"))
        loss = self._loss()
        # If a machine has lost its network, failures of ranks on any machine follow from this loss. But a cause that
        # was known before the loss stays the cause: node 0 ends its server when it has waited too long for a late node.
        if self._cause is not None and (loss is None or not self._cause.is_consequence):
            return self._cause
        return loss or (cause_of(self._node, outcome) if failed else None)

    def _exchange_ends(self, own: bytes) -> list[bytes]:
        """Exchanges whether the ranks of each machine failed; returns no answers if other launchers are late."""
        while True:
            left_seconds = max(0.0, self._deadline - time.monotonic())
            try:
                # The deadline may be set during this wait, so each wait is limited.
                seconds = min(self.limit_seconds, left_seconds)
                return self._client.exchange("ended", own, timeout_seconds=seconds)
            except RendezvousTimeout as error:
                if time.monotonic() >= self._deadline:
                    self.late_nodes = error.missing_ranks
                    return []

    def _learn(self, data: bytes) -> None:
        """Records the cause that a launcher has set, and limits the wait for the other launchers from now on."""
        self._cause = Cause.from_bytes(data, self._node)
        self._limit_wait()

    def _limit_wait(self) -> None:
        self._deadline = min(self._deadline, time.monotonic() + self.limit_seconds)

    def _loss(self) -> Cause | None:
        """Returns the loss of a launcher, or of the server on node 0, as the cause; None if the server works."""
        if not self._client.has_failed():
            return None
        node, why = 0, "the rendezvous server on node 0 is gone, or this machine has lost its network"
        try:
            self._client.check()
        except RankFailed as error:
            node, why = (0 if error.rank is None else error.rank), str(error)
        except GradsyncError as error:
            why = f"{why}: {error}"
        return Cause(node, f"was lost at {time.strftime('%H:%M:%S')}: {why}", "", 1, is_lost=True)

    def set_cause(self, cause: Cause) -> None:
        """Sets the cause, unless another launcher was first; limits the wait for the other launchers from now on."""
        self._limit_wait()
        with contextlib.suppress(GradsyncError):  # `_loss` returns a failure
            self._client.set("cause", cause.to_bytes(), replace=False)

    def _set_cause_of(self, outcome: Outcome) -> None:
        """Sets the cause, unless another launcher was first.

        If the failure on this machine only follows from another rank's failure, the method first waits for a cause from
        another launcher.
        """
        root = outcome.root_cause
        error = None if root is None or outcome.signal_number is not None else root.error
        if error is not None and error.is_consequence and not error.is_timeout:  # a silent rank reports no error
            with contextlib.suppress(GradsyncError):
                self._client.get("cause", timeout_seconds=_CAUSE_SECONDS)
        self.set_cause(cause_of(self._node, outcome))

    def _wait_for_cause(self, signals: SignalInbox) -> None:
        try:
            self._learn(self._client.get("cause", timeout_seconds=_NO_LIMIT_SECONDS))
        except CommunicatorClosed:
            return
        except GradsyncError:
            self._cause = self._loss()  # None if the other launchers have finished and left
        signals.put(FAILED_ELSEWHERE)


def _cause_of_exit(node: int, error: KeyboardInterrupt | SystemExit) -> Cause:
    """Returns the cause for a signal that raised this exception, see `_exit`."""
    return signal_cause(node, signal.SIGINT if isinstance(error, KeyboardInterrupt) else int(error.code or 0) - 128)


def _run_in_thread(work: Callable[[], None]) -> None:
    threading.Thread(target=work, name="gradsync nodes", daemon=True).start()
