"""Messages between two ranks: send, recv, and exchange, which does both at once."""

from __future__ import annotations

from typing import Any

from gradsync.arguments import integer_of
from gradsync.communicators.agreement import Agreement, agreement_on
from gradsync.communicators.backend import Message
from gradsync.communicators.collective_call import BYTE, CollectiveBase, CollectiveCall
from gradsync.errors import InvalidArgument, shown
from gradsync.reduction import Array


class Messages(CollectiveBase):
    """Part of a communicator's public methods. Messages between two ranks keep their order; there are no tags."""

    def send(self, array: Any, dest: int, *, stream: Any = None) -> None:
        """Sends an array to one other rank, which must call recv. Returns when that rank has taken it.

        Two ranks that both send first wait for each other until the deadline, as do two that both receive first: use
        exchange. On a GPU it returns when the message has been launched.

        Args:
            array: array of any shape, layout and dtype without Python objects, on this communicator's device.
            dest: the rank that receives it, not this one.
            stream: CUDA stream that orders the operation. Unused on the CPU.

        Raises:
            InvalidArgument: not an array, or no other rank of this communicator.
            UnsupportedDtype: the dtype holds Python objects.
            PlanMismatch: the other rank expects another shape or dtype, or does something else: raised on both.
            RankFailed, CollectiveTimeout, CommunicatorClosed, NcclError: as for all_reduce.
        """
        self._run(self._send_call(array, dest), stream)

    def _send_call(self, array: Any, dest: int) -> CollectiveCall:
        dest = self._checked_peer("send", "dest", dest)
        source = self.native_array(array, "send")
        agreement = self._message_agreement(source, self.rank, dest)

        def move(_launch: Any) -> None:
            self._exchange(self._outgoing(source, None, dest, agreement), None)

        return CollectiveCall("send", agreement, move)

    def recv(self, array: Any, source: int, *, stream: Any = None) -> Any:
        """Receives an array from one other rank, which must call send.

        Args:
            array: array for the values, of the shape and dtype that is sent, in any layout, on this communicator's
                device.
            source: the rank that sends it, not this one.
            stream: CUDA stream that orders the operation. Unused on the CPU.

        Returns:
            `array`.

        Raises:
            InvalidArgument: not an array that can be written to, or no other rank of this communicator.
            UnsupportedDtype, PlanMismatch, RankFailed, CollectiveTimeout, CommunicatorClosed, NcclError: as for send.
        """
        return self._run(self._recv_call(array, source), stream)

    def _recv_call(self, array: Any, source: int) -> CollectiveCall:
        source = self._checked_peer("recv", "source", source)
        target = self.native_array(array, "recv")
        self._check_writable("recv", target, remedy="pass another array")
        agreement = self._message_agreement(target, source, self.rank)

        def move(launch: Any) -> Any:
            flat = self._flat_target(target)
            self._exchange(None, Message(source, flat.view(BYTE), agreement))
            self._deliver(flat, target, launch)
            return array

        return CollectiveCall("recv", agreement, move)

    def exchange(self, array: Any, *, dest: int, out: Any, source: int, stream: Any = None) -> Any:
        """Sends an array to one rank and receives one from another, or the same, at once.

        However ranks pair up, in a ring or in twos, exchanges do not wait for each other in a circle. Each message may
        also meet a plain send or recv on the other side.

        Args:
            array: what is sent, as for send.
            dest: the rank that receives it; may be this one, where `source` is too.
            out: array for what comes, of its shape and dtype; may share memory with `array`.
            source: the rank that sends it.
            stream: CUDA stream that orders the operation. Unused on the CPU.

        Returns:
            `out`.

        Raises:
            InvalidArgument: not an array, no rank of this communicator, or an `out` that cannot be written to.
            UnsupportedDtype, PlanMismatch, RankFailed, CollectiveTimeout, CommunicatorClosed, NcclError: as for send.
        """
        return self._run(self._exchange_call(array, dest=dest, out=out, source=source), stream)

    def _exchange_call(self, array: Any, *, dest: int, out: Any, source: int) -> CollectiveCall:
        dest = self._checked_peer("exchange", "dest", dest, is_self_allowed=True)
        source = self._checked_peer("exchange", "source", source, is_self_allowed=True)
        if (dest == self.rank) != (source == self.rank):
            raise InvalidArgument(
                f"{self.label}: exchange with itself needs both dest and source {self.rank}, got dest {dest}, "
                f"source {source}"
            )
        outgoing = self.native_array(array, "exchange")
        target = self.native_array(out, "exchange: out")
        self._check_writable("exchange", target, "out", "pass another array")
        sending = self._message_agreement(outgoing, self.rank, dest)
        receiving = self._message_agreement(target, source, self.rank)
        if dest == self.rank and sending.digest != receiving.digest:
            raise InvalidArgument(
                f"{self.label}: exchange with itself needs out of shape {outgoing.shape} and dtype {outgoing.dtype}, "
                f"got shape {target.shape} and dtype {target.dtype}"
            )

        def move(launch: Any) -> Any:
            flat = self._flat_target(target)
            message = self._outgoing(outgoing, target, dest, sending)
            self._exchange(message, Message(source, flat.view(BYTE), receiving))
            self._deliver(flat, target, launch)
            return out

        return CollectiveCall("exchange", sending, move)

    def _outgoing(self, source: Array, target: Array | None, dest: int, agreement: Agreement) -> Message:
        flat = self._flat_source(source, target)
        self._keep(source, flat)
        return Message(dest, flat.view(BYTE), agreement)

    def _message_agreement(self, array: Array, sender: int, receiver: int) -> Agreement:
        way = f"rank {self.ranks[sender]} to rank {self.ranks[receiver]}"
        return agreement_on("message", array.shape, array.dtype, way, is_message=True)

    def _checked_peer(self, what: str, name: str, peer: int, *, is_self_allowed: bool = False) -> int:
        number = integer_of(peer)
        if number is None or not 0 <= number < self.world_size or (number == self.rank and not is_self_allowed):
            allowed = self._rank_range() + ("" if is_self_allowed else f", and not {self.rank}, this rank")
            raise InvalidArgument(f"{self.label}: {what} needs {name} from {allowed}, got {shown(peer)}")
        return number
