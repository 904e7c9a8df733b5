"""A run on several machines: one launcher on each machine; the launchers start, end and restart the ranks together.

Node 0 hosts one server, for the launchers and for their ranks. Each start of the ranks has four steps:

1. All launchers join at the server, again for each start, and exchange their records (`_NodeRun._join`). A launcher
that was lost, and that the user has started again, takes part in the next start. 2. Each launcher starts its ranks and
watches them (`Supervisor`). 3. The first launcher whose ranks fail reports the failure to the others, which then end
their ranks (`NodeLink`). 4. When its ranks have ended, each launcher sends a report and waits for the others' reports.
All launchers find the same cause in these reports, so they print the same cause and return the same exit code, or start
the ranks again.

If a launcher dies, or its machine loses its network, the server reports this to the other launchers. Threads wait for
messages from the other launchers, and wake the supervisor's loop by a number in its `SignalInbox`, as a signal does; so
the loop never waits for the network.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import json
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from types import FrameType, TracebackType
from typing import NamedTuple, TypeVar

from gradsync.arguments import DEFAULT_TIMEOUT_SECONDS, LARGEST_PORT, check_seconds, parse_address
from gradsync.environment import HOW_TO_MAKE_A_SECRET_FILE, SECRET_FILE, read_secret_option, take_secret
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
from gradsync.launching.hosting import own_listener
from gradsync.launching.job import Job
from gradsync.launching.outcome import Outcome, distance_from_cause, failure_text, lines_on_others, signal_name
from gradsync.launching.output import REPORT_SECONDS, Notices
from gradsync.launching.rank_report import from_json
from gradsync.launching.signals import FAILED_ELSEWHERE, SignalInbox
from gradsync.launching.supervisor import MakeOutput, Supervisor
from gradsync.machine import count_gpus, interface_of
from gradsync.rendezvous.client import RendezvousClient
from gradsync.rendezvous.frames import MAX_RANKS
from gradsync.rendezvous.secret_files import Endpoint
from gradsync.rendezvous.server import RendezvousServer
from gradsync.rendezvous.sockets import ConnectionLost, look_up

# Less than the 5 s between the server's notices, which could otherwise name a launcher that is about to connect again.
_JOIN_NOTICE_SECONDS = 4.0
_RETRY_SECONDS = 0.5
_EXCHANGE_SECONDS = 30.0  # how long to wait for the records of all launchers that have joined
_LEAVING_SECONDS = 5.0  # how long node 0 waits until the other launchers have left, at the end
_LEAVING_AFTER_LOSS_SECONDS = 0.5
_REPORTS_SECONDS = 60.0  # how long to wait for reports after a failure; killing ranks takes less time
_CHECK_SECONDS = 5.0  # how often a launcher that waits for reports checks whether the run has failed
_TEXT_SECONDS = 5.0
_NO_LIMIT_SECONDS = 1e8  # no limit is needed: heartbeats detect a launcher that is gone
_MAX_TEXT_BYTES = 40 * 1024  # less than the 60 KiB that a value on the server may have
_START_BYTES = 8

# Levels of `NodeReport` for a launcher that received a signal, and for a lost launcher. Both are lower than the levels
# of failed ranks, because a failed rank cannot be their cause.
_SIGNALLED, _LOST = -2, -1

_Message = TypeVar("_Message")


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
        node_address: this machine's address, if the user gave it; else None.
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
    nnodes: int,
    node_rank: int | None,
    rendezvous: str | None,
    secret_file: str | None,
    join_timeout_seconds: float,
    node_address: str | None,
) -> NodeOptions:
    """Checks the options of a run on several machines.

    Raises:
        InvalidArgument: an option is missing, malformed or out of its range, or the secret cannot be read.
    """
    check_seconds("gradsync run", "--join-timeout", join_timeout_seconds)
    if nnodes > MAX_RANKS:
        raise InvalidArgument(f"--nnodes needs to be at most {MAX_RANKS}, got {nnodes}")
    if node_rank is None:
        raise InvalidArgument(f"--nnodes {nnodes} needs --node-rank, this machine's number from 0 to {nnodes - 1}")
    if node_rank >= nnodes:
        raise InvalidArgument(f"--node-rank needs to be from 0 to {nnodes - 1} with --nnodes {nnodes}, got {node_rank}")
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
    except ValueError:  # it is a name
        return
    if known.is_unspecified or (known.version == 6 and known.is_link_local):
        shown = repr(given) if given == address else f"{given!r} ({address})"
        raise InvalidArgument(
            f"{option} needs an address of one particular machine, by which the other machines reach it, got {shown}"
        )


def _check_own(node_address: str) -> str:
    """Returns the IP address of --node-address, after checking that it belongs to this machine."""
    try:
        address = str(look_up(node_address, 0)[0][4][0])
    except OSError as error:
        raise InvalidArgument(f"--node-address {node_address!r} cannot be resolved on this machine: {error}") from None
    if interface_of(address) is None:
        raise InvalidArgument(f"--node-address {node_address!r} is no address of this machine; see: ip address")
    return address


# -- Messages between launchers ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NodeRecord:
    """The record that a launcher sends to the other launchers before each start of the ranks.

    Attributes:
        node: the number of the launcher's machine.
        host: the machine's host name.
        address: the machine's address, as the other machines reach it.
        interface: the network interface that has this address; None if it is not known.
        n_ranks: the number of ranks that the launcher starts.
        n_gpus: the number of GPUs that the launcher may use.
        restart: the number of restarts so far, as far as this launcher knows; 0 at the first start.
        max_restarts: the limit of restarts.
        master_port: the value of MASTER_PORT. All launchers use the `master_port` of node 0.
        start: a random name for this start of the ranks. All launchers use the name from node 0.
    """

    node: int
    host: str
    address: str
    interface: str | None
    n_ranks: int
    n_gpus: int
    restart: int
    max_restarts: int
    master_port: int
    start: str

    @property
    def name(self) -> str:
        """The name of this node in messages."""
        return f"node {self.node} ({self.host}, {self.address})"

    @classmethod
    def from_bytes(cls, node: int, data: bytes) -> NodeRecord:
        """Decodes the record of a node's launcher.

        Raises:
            RendezvousError: the data is not a record of this node.
        """
        record = decode(cls, data, f"the record of node {node}")
        if record.node != node or record.n_ranks < 1 or not 0 <= record.master_port <= LARGEST_PORT:
            what = f"node {record.node}, {record.n_ranks} ranks, port {record.master_port}"
            raise _unreadable(f"the record of node {node}", what)
        return record


@dataclass(frozen=True)
class NodeReport:
    """How a start of the ranks ended on one machine.

    Attributes:
        node: the machine's number.
        level: the distance of this machine's failure from the cause, see `distance_from_cause`; or `_SIGNALLED` or
            `_LOST`. The level is None if no rank failed, or if the cause is not known yet.
        how: how the node ended, in words that follow the node's name.
        exit_code: the exit code that all launchers return if the failure on this machine is the cause.
        may_retry: whether the ranks may be started again.
    """

    node: int
    level: int | None = None
    how: str = ""
    exit_code: int = 0
    may_retry: bool = True


def report_of(node: int, outcome: Outcome) -> NodeReport:
    """Returns a machine's report on how its ranks ended."""
    root = outcome.root_cause
    if outcome.signal_number is not None:
        return signal_report(node, outcome.signal_number)
    if root is None:
        return NodeReport(node)
    return NodeReport(node, distance_from_cause(root)[0], "failed", outcome.exit_code, outcome.may_be_tried_again)


def signal_report(node: int, number: int) -> NodeReport:
    """Returns the report of a launcher that has received a signal."""
    return NodeReport(node, _SIGNALLED, f"was ended by {signal_name(number)}", 128 + number, may_retry=False)


def loss_report(node: int, how: str) -> NodeReport:
    """Returns the report on a lost launcher, which can send no report itself."""
    return NodeReport(node, _LOST, how, exit_code=1)


def cause_of(reports: Iterable[NodeReport], first_node: int | None) -> NodeReport | None:
    """Returns the report of the machine whose failure is the cause; None if no machine reported a failure.

    Args:
        reports: the reports of all machines, as far as they are known.
        first_node: the first node that reported a failure; None if no node did.
    """
    failed = [report for report in reports if report.level is not None]
    return min(failed, key=lambda report: (report.level, report.node != first_node, report.node), default=None)


def encode(message: NodeRecord | NodeReport) -> bytes:
    """Returns a record or report as bytes for another launcher."""
    return json.dumps(asdict(message), separators=(",", ":")).encode()  # compact, for exchanges of thousands of nodes


def decode(kind: type[_Message], data: bytes, what: str) -> _Message:
    """Decodes a record or report that another launcher has encoded.

    Raises:
        RendezvousError: the bytes are not a message of this kind.
    """
    try:
        return from_json(kind, data)
    except ValueError as error:
        raise _unreadable(what, str(error)) from None


def _unreadable(what: str, why: str) -> RendezvousError:
    return RendezvousError(f"{what} cannot be read: {why}; run the same version of gradsync on every machine")


# -- The run -----------------------------------------------------------------------------------------------------------


def run_on_nodes(options: NodeOptions, job: Job, make_output: MakeOutput, notices: Notices) -> int:
    """Runs this machine's ranks in a run on several machines.

    Args:
        options: this machine's options in the run.
        job: the job of this machine, as if no other machine took part; `NodeStart.job` adds the other machines.
        make_output: see `supervise`.
        notices: the object that prints the launcher's notices.

    Returns:
        The exit code, the same on all machines.

    Raises:
        InvalidArgument: the options do not fit this machine, or differ from the options on another machine.
        AuthenticationError, RendezvousError, RendezvousTimeout: the launchers could not join each other.
    """
    with _ended_by_signals(), _hosting(options, notices) as server:
        return _NodeRun(options, job, make_output, notices, server).run()


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Makes SIGTERM and SIGHUP raise SystemExit in this launcher, also while it waits for the other launchers.

    By default such a signal would end the launcher at once, and its files, such as the state directory, would stay
    behind.
    """

    def end(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    previous = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) == signal.SIG_DFL:  # not if it is ignored or has a handler
                previous[number] = signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


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
            bound_host = options.node_address or _resolve(host, port, notices)
            listener = stack.enter_context(own_listener(bound_host, port, if_taken=another))
        except RendezvousError as error:
            if isinstance(error.__context__, OSError) and error.__context__.errno == errno.EADDRINUSE:
                raise RendezvousError(f"{options.name}: {error}") from None
            raise RendezvousError(
                f"{options.name}: {error}; node 0 hosts the rendezvous server: start node 0 on the machine with the "
                f"address {options.rendezvous!r}, or give an address of this machine with --node-address"
            ) from None
        server = RendezvousServer(options.nnodes, secret=options.secret, listener=listener, of_launchers=True)
        yield stack.enter_context(server)


def _resolve(host: str, port: int, notices: Notices) -> str:
    """Returns the address of a host name, as this machine resolves it."""
    try:
        found = str(look_up(host, port)[0][4][0])
    except OSError as error:
        raise RendezvousError(
            f"--rendezvous: node 0 cannot resolve the name {host!r}: {error}; give an IP address instead, or an "
            "address of this machine with --node-address"
        ) from None
    _check_particular("--rendezvous", host, found)
    if host not in ("localhost", found) and ipaddress.ip_address(found.partition("%")[0]).is_loopback:
        notices.print(
            f"gradsync: warning: on this machine {host!r} has the address {found}, which no other machine can reach; "
            "give another address in --rendezvous, or an address of this machine with --node-address"
        )
    return found


@dataclass(frozen=True)
class NodeStart:
    """One start of the ranks: the launchers that take part in it.

    Attributes:
        client: this launcher's connection to the server.
        own: this launcher's record.
        nodes: the records of all launchers, in the order of the nodes.
    """

    client: RendezvousClient
    own: NodeRecord
    nodes: tuple[NodeRecord, ...]

    @property
    def restart(self) -> int:
        """The number of restarts: the largest in all records, because a launcher that was lost starts again from 0."""
        return max(record.restart for record in self.nodes)

    @property
    def world_size(self) -> int:
        """The number of ranks on all machines."""
        return sum(record.n_ranks for record in self.nodes)

    def mpi_command(self, job: Job) -> str:
        """Returns the `mpiexec` command that starts the same ranks as this run."""
        hosts = [f"{node.host if ':' in node.address else node.address}:{node.n_ranks}" for node in self.nodes]
        return job.target.mpi_command(self.world_size, hosts)

    def job(self, job: Job, secret: bytes) -> Job:
        """Returns the job of this machine with the values of the whole run: all ranks, the first rank, the addresses.

        Args:
            job: the job of this machine, as if no other machine took part.
            secret: the secret of the run.
        """
        own, first = self.own, self.nodes[0]
        groups = {
            "GROUP_RANK": str(own.node),
            "GROUP_WORLD_SIZE": str(len(self.nodes)),
            "TORCHELASTIC_RUN_ID": f"gradsync-{first.start[:8]}",
        }
        return replace(
            job,
            world_size=self.world_size,
            rank_start=sum(record.n_ranks for record in self.nodes[: own.node]),
            master_addr=first.address,
            master_port=first.master_port,
            endpoint=Endpoint(self.client.address, secret, first.start),
            own_address=own.address,
            variables={**groups, **job.variables},
        )


class _NodeRun:
    """One run: starts the ranks, and restarts them after failures."""

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
        self._restart = 0  # the number of times that this launcher has started its ranks again

    def run(self) -> int:
        """Starts the ranks, and restarts them as often as needed; returns the exit code."""
        while True:
            verdict, report = self._run_start()
            if verdict.cause is None:
                self._leave(verdict)
                return 0
            if not verdict.may_retry or self._restart >= self._job.max_restarts:
                self._notices.print_all(report)
                self._leave(verdict)
                return verdict.cause.exit_code
            self._notices.print(report, wait_seconds=REPORT_SECONDS)
            self._restart += 1
            how_often = f"restart {self._restart} of at most {self._job.max_restarts}"
            when = f", once node {verdict.cause.node} is back" if verdict.is_lost else ""
            self._notices.print(f"gradsync: starting all ranks again{when} ({how_often})")

    def _leave(self, verdict: Verdict) -> None:
        """On node 0, waits until the other launchers have left; only briefly if a launcher was lost."""
        if self._server is not None:
            self._server.wait_until_empty(_LEAVING_AFTER_LOSS_SECONDS if verdict.is_lost else _LEAVING_SECONDS)

    def _run_start(self) -> tuple[Verdict, str]:
        """Starts the ranks once, and waits until they have ended; returns the verdict and the text to print."""
        with contextlib.ExitStack() as stack:
            master_port = 0 if self._server is None else stack.enter_context(reserved_port())
            start = self._join(master_port)
            self._restart = start.restart
            signals = stack.enter_context(SignalInbox())
            link = stack.enter_context(NodeLink(start, signals, self._notices))
            supervisor = Supervisor(
                self._job_of(start),
                signals,
                make_output=self._make_output,
                notices=self._notices,
                server=start.client,
                on_ending=link.report_ending,
            )
            with supervisor:
                supervisor.start(start.restart)
                outcome = supervisor.finish_start()
            verdict = link.gather(report_of(start.own.node, outcome), failure_text(outcome))
        return verdict, _report(verdict, outcome, start)

    def _join(self, master_port: int) -> NodeStart:
        """Waits until all launchers have joined, exchanges their records, and begins a start of the ranks.

        Raises:
            RendezvousTimeout: not all launchers joined in time; the text names the missing ones.
            AuthenticationError: the secrets differ.
            RendezvousError: the rendezvous server refused this launcher, or is gone.
            InvalidArgument: the options of the launchers differ.
        """
        node_address = self._options.node_address
        own_address = None if node_address is None else _check_own(node_address)
        while True:
            client = self._connect()
            try:
                own = self._own_record(own_address or client.own_host, master_port)
                records = client.exchange("nodes", encode(own), timeout_seconds=_EXCHANGE_SECONDS)
                nodes = tuple(NodeRecord.from_bytes(node, data) for node, data in enumerate(records))
                start = NodeStart(client, own, nodes)
                self._check_start(start)
                client.begin_start(nodes[0].start, start.world_size)
                return start
            except InvalidArgument:
                client.close()
                raise
            except RankFailed as error:  # a launcher died after it had joined, and before it sent its record
                client.abandon()
                self._notices.print(f"gradsync: {self._options.name} waits again until all nodes have joined: {error}")
            except BaseException:
                client.abandon()
                raise

    def _connect(self) -> RendezvousClient:
        """Waits until all launchers have joined; prints every few seconds which are missing.

        On node 0 the server prints the missing launchers.
        """
        options = self._options
        deadline = time.monotonic() + options.join_timeout_seconds
        while True:
            left_seconds = max(deadline - time.monotonic(), 0.0)
            try:
                return RendezvousClient.connect(
                    self._address,
                    secret=options.secret,
                    rank=options.node_rank,
                    world_size=options.nnodes,
                    timeout_seconds=min(left_seconds, _JOIN_NOTICE_SECONDS) if options.node_rank else left_seconds,
                    noun="node",
                )
            except AuthenticationError as error:
                raise AuthenticationError(f"{error}; --secret-file needs the same secret on every machine") from None
            except RendezvousTimeout as error:
                reason = f"missing: {error.missing or f'node 0 ({error.cause or error})'}"
            except RankFailed as error:
                reason = f"a node left while others joined ({error})"
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

    def _own_record(self, address: str, master_port: int) -> NodeRecord:
        return NodeRecord(
            node=self._options.node_rank,
            host=socket.gethostname(),
            address=address,
            interface=interface_of(address),
            n_ranks=self._job.n_ranks,
            n_gpus=count_gpus(),
            restart=self._restart,
            max_restarts=self._job.max_restarts,
            master_port=master_port,
            start=os.urandom(_START_BYTES).hex(),
        )

    def _check_start(self, start: NodeStart) -> None:
        """Raises InvalidArgument if the launchers' options differ, or if the backend needs MPI's own launcher."""
        first = start.nodes[0]
        for record in start.nodes:
            if record.max_restarts != first.max_restarts:
                raise InvalidArgument(
                    f"all machines need the same --max-restarts; node 0 has {first.max_restarts}, "
                    f"{record.name} {record.max_restarts}"
                )
        if self._job.backend == "mpi":
            command = start.mpi_command(self._job)
            raise InvalidArgument(f"--backend mpi needs MPI's own launcher; run on one node only: {command}")

    def _job_of(self, start: NodeStart) -> Job:
        """Returns the job of this machine's ranks in this start, and prints which ranks these are."""
        stdin_rank = self._job.stdin_rank
        if stdin_rank is not None and stdin_rank >= start.world_size:
            raise InvalidArgument(f"--stdin needs a rank from 0 to {start.world_size - 1}, or 'none', got {stdin_rank}")
        own, job = start.own, start.job(self._job, self._options.secret)
        ranks = f"rank {job.rank_start}" if job.n_ranks == 1 else f"ranks {job.rank_start} to {job.ranks[-1]}"
        self._notices.print(
            f"gradsync: node {own.node} of {len(start.nodes)} ({own.host}): {ranks} of {job.world_size}, at "
            f"{own.address} ({own.interface or 'no interface known'}); rendezvous at {self._options.rendezvous}"
        )
        without_gpu = [node.name for node in start.nodes if node.n_gpus == 0]
        if job.backend == "auto" and without_gpu and own.node == 0:
            self._notices.print(
                f"gradsync: no GPU on {without_gpu[0]}: gs.init_process_group() will fail, because a run on several "
                "machines needs a GPU for each rank, or MPI; to use MPI, run on one node only: "
                f"{start.mpi_command(job)}"
            )
        return job


def _report(verdict: Verdict, outcome: Outcome, start: NodeStart) -> str:
    """Returns the text to print after a failed start: the other failures on this machine, then the cause."""
    cause = verdict.cause
    if cause is None:
        return ""
    is_shown_below = cause.node == start.own.node and not verdict.is_lost
    before = "" if is_shown_below else lines_on_others(outcome)
    head = f"gradsync: {start.nodes[cause.node].name} {cause.how}"
    return f"{before}{head}{':' if verdict.text else ''}\n{verdict.text}".rstrip("\n")


# -- The end of a start ------------------------------------------------------------------------------------------------


class Verdict(NamedTuple):
    """How a start of the ranks ended on all machines.

    Attributes:
        cause: the report of the machine whose failure is the cause; None if all ranks ended well.
        text: the text that this machine sent about its failed ranks; "" if it sent none.
        is_lost: whether a launcher is gone, or has not reported how its ranks ended.
        may_retry: whether the ranks may be started again.
    """

    cause: NodeReport | None
    text: str
    is_lost: bool
    may_retry: bool


class NodeLink:
    """This launcher's connection to the others during one start; a context manager that disconnects when it ends.

    Args:
        start: the records of all launchers in this start, and the connection to the server.
        signals: this launcher's `SignalInbox`, inside its `with` block.
        notices: the object that prints a notice after Ctrl-C.
    """

    def __init__(self, start: NodeStart, signals: SignalInbox, notices: Notices) -> None:
        self._client = start.client
        self._nodes = start.nodes
        self._node = start.own.node
        self._signals = signals
        self._notices = notices
        # The report of the first launcher that ends its ranks. Its level is None, unless a signal came after the ranks
        # had ended.
        self._first: NodeReport | None = None
        self._loss: NodeReport | None = None
        self._reports: list[NodeReport] = []
        self._has_gathered = False
        self._is_incomplete = False  # whether a launcher has not reported how its ranks ended

    def __enter__(self) -> NodeLink:
        _run_in_thread(self._listen)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._client.report_failure(describe(error))
        if self._loss is None:
            self._client.close()
        else:
            self._client.abandon()

    def report_ending(self) -> None:
        """Reports to the other launchers that the ranks on this machine have failed and will end; returns at once."""
        _run_in_thread(lambda: self._report_first(NodeReport(self._node)))

    def gather(self, report: NodeReport, text: str) -> Verdict:
        """Reports how this machine's ranks ended, and waits until all other launchers have reported, or one is lost.

        A signal during the wait ends the ranks on the other machines; a second signal ends the wait. After a failure
        the wait lasts a minute at most.

        Args:
            report: how the ranks of this machine ended.
            text: the text to print about the failed ranks of this machine.
        """
        _run_in_thread(lambda: self._exchange_reports(report, text))
        interrupted: NodeReport | None = None
        poll = select.poll()
        poll.register(self._signals.descriptor, select.POLLIN)
        while not self._has_gathered:
            poll.poll()
            for number in self._signals.read():
                if number == signal.SIGTSTP:
                    os.kill(os.getpid(), signal.SIGSTOP)
                elif number != FAILED_ELSEWHERE and (interrupted is not None or report.level == _SIGNALLED):
                    self._has_gathered = True
                elif number != FAILED_ELSEWHERE:
                    interrupted = self._interrupt(number)
        known = [*self._reports, report, interrupted, self._first, self._loss]
        return self._judge([one for one in known if one is not None], text)

    def _interrupt(self, number: int) -> NodeReport:
        """Ends the ranks of the other machines, after the ranks of this machine have ended."""
        report = signal_report(self._node, number)
        self._notices.print("gradsync: stopping the ranks of the other nodes (Ctrl-C again leaves at once)")
        _run_in_thread(lambda: self._report_first(report))
        return report

    def _judge(self, reports: list[NodeReport], own_text: str) -> Verdict:
        cause = cause_of(reports, None if self._first is None else self._first.node)
        text = ""
        if cause is not None and cause.level != _LOST:
            text = own_text if cause.node == self._node else self._text_of(cause.node)
        is_lost = self._loss is not None or self._is_incomplete
        may_retry = cause is not None and not self._is_incomplete and all(report.may_retry for report in reports)
        return Verdict(cause, text, is_lost, may_retry)

    def _text_of(self, node: int) -> str:
        """Returns another machine's report on its ranks; "" if the server cannot deliver it."""
        try:
            return self._client.get(f"text/{node}", timeout_seconds=_TEXT_SECONDS).decode(errors="replace")
        except GradsyncError:
            return ""

    # The following methods run in threads.

    def _listen(self) -> None:
        """Waits until a launcher reports that its ranks fail, or until a launcher is lost."""
        try:
            data = self._client.get("first", timeout_seconds=_NO_LIMIT_SECONDS)
            self._first = decode(NodeReport, data, "the report of another launcher")
        except CommunicatorClosed:
            return
        except GradsyncError as error:
            if self._client.has_failed():  # otherwise the other launchers have finished and left
                self._lose(error)
            return
        if self._first.node != self._node:
            self._signals.put(FAILED_ELSEWHERE)

    def _report_first(self, report: NodeReport) -> None:
        """Reports that this machine's ranks fail, unless another launcher was first: one report ends all ranks."""
        with contextlib.suppress(GradsyncError):  # the thread of `_listen` gets the same error, and handles it
            self._client.set("first", encode(report), replace=False)

    def _exchange_reports(self, report: NodeReport, text: str) -> None:
        """Sends this machine's report and its text to the other launchers, and waits for their reports."""
        waited_seconds = 0.0  # how long this thread has waited since the first failure
        try:
            if report.level is not None:
                self._report_first(NodeReport(self._node))
            self._client.set(f"text/{self._node}", _clipped(text))
            while not self._reports and not self._is_incomplete:
                try:
                    reports = self._client.exchange("reports", encode(report), timeout_seconds=_CHECK_SECONDS)
                    self._reports = [decode(NodeReport, data, "the report of another launcher") for data in reports]
                except RendezvousTimeout as error:
                    waited_seconds += 0.0 if self._first is None else _CHECK_SECONDS
                    if waited_seconds >= _REPORTS_SECONDS:
                        self._stop_waiting(error.missing_ranks)
        except CommunicatorClosed:
            return
        except GradsyncError as error:
            self._lose(error)
        self._has_gathered = True
        self._signals.put(FAILED_ELSEWHERE)  # to end the poll of `gather`

    def _stop_waiting(self, missing: tuple[int, ...]) -> None:
        """Stops waiting for missing reports: a launcher may be paused (SIGSTOP), or its terminal may be blocked."""
        silent = self._nodes[missing[0] if missing else 0]
        self._notices.print(
            f"gradsync: {silent.name} has sent no report about its ranks for {_REPORTS_SECONDS:g} s after a failure; "
            "this launcher no longer waits for the report"
        )
        self._is_incomplete = True

    def _lose(self, error: GradsyncError) -> None:
        """Records that a launcher is lost: the one that the server names, or node 0 if the server itself is lost."""
        if self._loss is None:
            node, why = 0, f"the rendezvous server on node 0 is gone, or this machine has lost its network: {error}"
            if isinstance(error, RankFailed) and error.rank is not None:
                node, why = error.rank, str(error)
            self._loss = loss_report(node, f"was lost at {time.strftime('%H:%M:%S')}: {why}")
        self._signals.put(FAILED_ELSEWHERE)


def _run_in_thread(work: Callable[[], None]) -> None:
    threading.Thread(target=work, name="gradsync nodes", daemon=True).start()


def _clipped(text: str) -> bytes:
    """Returns the text as bytes; leaves out the beginning of a long text, because the cause comes last."""
    data = text.encode(errors="backslashreplace")
    if len(data) <= _MAX_TEXT_BYTES:
        return data
    return b"gradsync: (the beginning of this report is left out)\n" + data[-_MAX_TEXT_BYTES:].partition(b"\n")[2]
