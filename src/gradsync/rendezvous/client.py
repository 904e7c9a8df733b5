"""The blocking rendezvous client: one per rank, through which it meets the others.

The public face of the client's side, used by the process group and the communicators: `membership`, and what the
members of a generation share.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

from gradsync.errors import InvalidArgument
from gradsync.rendezvous.agreements import Verdict
from gradsync.rendezvous.client_connection import ClientConnection
from gradsync.rendezvous.followers import OnAsked
from gradsync.rendezvous.membership import Membership
from gradsync.rendezvous.messages import FrameType
from gradsync.rendezvous.scopes import is_under
from gradsync.rendezvous.unique_ids import UniqueIds


class RendezvousClient(Membership):
    """A rank's membership in one generation, and what it shares with the others there; made by `connect`.

    Attributes:
        world_ranks: all ranks; of a GroupClient, those of its group.
        label: this rank in messages, e.g. "rank 1/4".
    """

    def __init__(self, connection: ClientConnection, rank: int, world_size: int, called: str = "rank") -> None:
        super().__init__(connection, rank, world_size, called)
        self.world_ranks = tuple(range(world_size))
        self.label = self._who
        self._ids = UniqueIds(self._requests, rank, self._who)
        self._passed_positions: dict[str, int] = {}

    def set(self, key: str, value: bytes) -> None:
        """Stores a value of at most 60 KiB under a key, for all ranks of this generation.

        Raises:
            InvalidArgument: the key or the value does not fit.
            RankFailed, RendezvousError: the generation or the server has failed.
        """
        data = bytes(value) if isinstance(value, (bytearray, memoryview)) else value
        self._requests.ask_at_once(f"set {key!r}", FrameType.SET, key, data)

    def get(self, key: str, *, timeout_seconds: float = 120.0) -> bytes:
        """Returns the value of a key; waits until some rank sets it.

        Raises:
            RendezvousTimeout: nobody set it by the deadline.
            RankFailed: a rank died, or every other rank has left.
        """
        return bytes(self._requests.ask(f"get {key!r}", timeout_seconds, FrameType.GET, key))

    def add(self, key: str, amount: int = 1) -> int:
        """Adds to a counter, atomically, and returns its new value; a new counter starts at 0.

        A counter is a key that holds a decimal number; `get` and `set` see it as text.
        """
        return int(self._requests.ask_at_once(f"add {key!r}", FrameType.ADD, key, amount))

    def delete(self, key: str) -> bool:
        """Removes a key; returns whether it was there."""
        return bool(self._requests.ask_at_once(f"delete {key!r}", FrameType.DELETE, key))

    def barrier(self, name: str = "", *, ranks: Sequence[int] | None = None, timeout_seconds: float = 120.0) -> None:
        """Waits until every rank has arrived.

        Every rank of `ranks` must call it with the same name and the same ranks. Reusable any number of
        times. A rank whose deadline comes first is withdrawn, and may come back to it.

        Args:
            name: names the barrier among those of the same ranks.
            ranks: who takes part; all ranks by default.
            timeout_seconds: this rank's deadline.

        Raises:
            RendezvousTimeout: `missing_ranks` names the ranks that did not come, the text where they are.
            RankFailed: a rank died, or one that is needed has left.
        """
        members = self._check_ranks(ranks)
        self._requests.ask(f"barrier {name!r}", timeout_seconds, FrameType.BARRIER, name, members)

    def unique_id(
        self,
        group: str,
        *,
        root: int,
        ranks: Sequence[int] | None = None,
        make_id: Callable[[], bytes] | None,
        timeout_seconds: float = 120.0,
    ) -> bytes:
        """Returns the one 128-byte id of a group in this generation; treat it as a secret.

        Every member must call it with the same root and ranks. The root makes the id, once; the others wait.

        Args:
            group: the group's name.
            root: the rank that makes the id.
            ranks: the members; all ranks by default.
            make_id: returns 128 bytes; called by the root only, others may pass None.
            timeout_seconds: this rank's deadline.

        Raises:
            InvalidArgument: the id is not 128 bytes, this rank is no member, or the members disagree.
            RendezvousTimeout: the root did not hand the id in by the deadline.
            RankFailed: a rank died, or the root has left without handing it in.
        """
        return self._ids.get(group, root, self._check_ranks(ranks), make_id, timeout_seconds)

    def agree(
        self,
        group: str,
        position: int,
        digest: int,
        *,
        ranks: Sequence[int] | None = None,
        timeout_seconds: float = 120.0,
    ) -> Verdict:
        """Asks whether all members do the same at a position of their group, and returns the verdict.

        Returns once every member has called it for this position, or has told, asked through `follow`, that it has
        gone ahead: SAME when all digests are equal, else DIFFERENT, or PASSED when a member went ahead with another
        digest. PASSED comes at once, and for every later position of the group too; `passed_position` says where.

        Args:
            group: the group's name, at most 960 bytes.
            position: which of the group's collectives, from 0.
            digest: of what this rank is about to do, an unsigned integer of 64 bits.
            ranks: the members, the same in every call for this group; all ranks by default.
            timeout_seconds: this rank's deadline.

        Raises:
            InvalidArgument: an argument is out of its range, the members differ from an earlier call's, or this rank
                already waits at this position.
            RendezvousTimeout: `missing_ranks` names the members who did not report, the text where they are.
            RankFailed: a rank died, or a member who has not reported has left.
        """
        operation = f"agree {group!r} at position {position}"
        fields = (group, operator.index(position), operator.index(digest), self._check_ranks(ranks))
        verdict, decided_at = self._requests.ask(operation, timeout_seconds, FrameType.AGREE, *fields)
        if verdict == Verdict.PASSED:
            self._passed_positions[group] = decided_at
        return Verdict(verdict)

    def passed_position(self, group: str) -> int | None:
        """Returns where a member of the group went ahead, known after a verdict of PASSED; else None.

        It may lie before the position that this rank asked about: then this rank went ahead there too.
        """
        return self._passed_positions.get(group)

    def follow(self, group: str, on_asked: OnAsked) -> None:
        """Lets `on_asked(position)` say what this rank launched there, whenever another member asks.

        Call it before the group's first collective: a question that comes earlier is not kept. `on_asked` runs in
        whichever thread receives the question, in a request, in `check` or in the one that sends the heartbeats,
        without a lock of this client held; two threads may run it at once. It is to be quick and not to raise.

        Args:
            group: the group's name.
            on_asked: returns what this rank launched at that position, or None when it has not come there yet. It
                must `agree` there then, even if it would have gone ahead.

        Raises:
            InvalidArgument: the group is followed already.
        """
        self._requests.followers.follow(group, on_asked)

    def unfollow(self, group: str) -> None:
        """Ends `follow`; a call under way in another thread may still run. Idempotent."""
        self._requests.followers.unfollow(group)

    def forget(self, name: str, *, ranks: Sequence[int] | None = None) -> None:
        """Says that this rank is done with what stands under a name, without waiting for an answer.

        Once all members have said so, or left, the server drops it: keys, barriers, ids and agreements that are called
        `name` or "name/...". A group that came to use the name again might lose what it puts there.

        Args:
            name: of a group, as a rule.
            ranks: the members; all ranks by default.
        """
        members = self._check_ranks(ranks)
        self._ids.forget(name)
        for group in [group for group in self._passed_positions if is_under(group, name)]:
            del self._passed_positions[group]
        self._requests.forget(name, members)

    def _check_ranks(self, ranks: Sequence[int] | None) -> list[int] | None:
        """Returns the members in ascending order, or None for all ranks."""
        if ranks is None:
            return None
        members = sorted(operator.index(rank) for rank in ranks)
        fits = members and members[0] >= 0 and members[-1] < self.world_size and len(set(members)) == len(members)
        if not fits or self.rank not in members:
            raise InvalidArgument(
                f"{self._who}: ranks need to be distinct, from 0 to {self.world_size - 1}, "
                f"and to include this rank, got {members}"
            )
        return members
