"""What the server sends unasked: inquiries and questions of other ranks, which it wants answered, and failures.

Sits between `inbox`, which reads them, and those of this rank who have the answer.
"""

from __future__ import annotations

from gradsync.rendezvous.followers import Followers
from gradsync.rendezvous.messages import FrameType, Message
from gradsync.rendezvous.self_report import SelfReport


class Pushes:
    """Hands each push to who answers it.

    Args:
        followers: who answers the questions of other ranks.
        self_report: who answers for this rank.
    """

    def __init__(self, followers: Followers, self_report: SelfReport) -> None:
        self._followers = followers
        self._self_report = self_report

    def answer(self, message: Message) -> None:
        """Answers one push; no thread reads the connection meanwhile for this one."""
        if message.type is FrameType.ASKED:
            self._followers.tell(*message.fields)
        elif message.type is FrameType.INQUIRE:
            self._self_report.answer(*message.fields)
        elif message.type is FrameType.FAILED:
            self._self_report.note_trouble(message.fields[-1].partition("\n")[0])
