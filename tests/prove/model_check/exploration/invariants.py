"""What has to hold of everything that the core does in one turn. Each returns what is wrong, or None."""

from __future__ import annotations

from collections.abc import Callable

from exploration.ledger import ANSWERS, Era, Turn
from gradsync.rendezvous.frames import STUCK, Close, FrameType, Message, Received, Send
from gradsync.rendezvous.roster import LEFT_PHASE


def no_answer_without_a_request_and_none_twice(turn: Turn) -> str | None:
    """Each answer meets a request of that connection that is open, and closes it."""
    met = set()
    for answer in turn.answers:
        place = answer.connection, answer.fields[0]
        if turn.asked(answer) is None:
            return f"connection {answer.connection} has no open request {answer.fields[0]}, and got {_told(answer)}"
        if place in met:
            return f"request {answer.fields[0]} of connection {answer.connection} was answered twice in one turn"
        met.add(place)
    return None


def nothing_is_sent_to_who_is_gone(turn: Turn) -> str | None:
    """A connection that was lost, closed, or has said goodbye gets no message any more."""
    alive = set(turn.ledger.alive)
    for action in turn.actions:
        if isinstance(action, Send) and action.connection not in alive:
            return f"connection {action.connection} is gone, and was sent {_told(action)}"
        if isinstance(action, Close):
            alive.discard(action.connection)
    return None


def who_sits_was_awaited(turn: Turn) -> str | None:
    """A rank gets a seat only in a generation that has not formed, has not failed and has not had that rank."""
    for send in turn.sends:
        if send.type is not FrameType.PULSE or send.connection in turn.ledger.seats:
            continue
        rank = turn.rank_at(send.connection)
        if rank is None:
            return f"connection {send.connection} was seated without having asked to join"
        era = turn.ledger.era_to_join(rank)
        if era.number is not None or era.has_failed:
            return f"rank {rank} was seated in generation {era.number}, failed: {era.has_failed}"
    return None


def a_generation_forms_of_all_ranks_at_once(turn: Turn) -> str | None:
    """All members hear the number of their generation in the same turn: each rank once, one number, none before."""
    told = [s for s in turn.answers if s.type is FrameType.REPLY and _joins(turn, s)]
    formed = sorted((s.connection, s.fields[1][0]) for s in told)
    if not formed:
        return None
    members = {connection: turn.rank_at(connection) for connection, _ in formed}
    if sorted(members.values()) != list(range(turn.ledger.world_size)) or len({number for _, number in formed}) != 1:
        return f"a generation was formed of {members} (connection: rank), told (connection, number): {formed}"
    eras = [era for era in map(turn.era_at, members) if era is not None]
    if any(era is not eras[0] or era.number is not None or era.has_failed for era in eras):
        return f"a generation that had formed or failed was formed again: {formed}"
    if turn.ledger.numbers and formed[0][1] <= turn.ledger.numbers:
        return f"generation {formed[0][1]} was formed after generation {turn.ledger.numbers}"
    return None


def each_present_member_is_told_a_failure_once(turn: Turn) -> str | None:
    """In the turn in which a generation fails, exactly its present members are told, who has reported it too."""
    pushed = sorted(push.connection for push in turn.pushes)
    again = turn.ledger.told.intersection(pushed)
    if again or len(set(pushed)) != len(pushed):
        return f"connections {sorted(again) or pushed} were told twice that their generation has failed"
    eras = [era for era in map(turn.era_at, pushed) if era is not None]
    expected = sorted(turn.due or {connection for era in eras for connection in turn.ledger.present(era)})
    return None if pushed == expected else f"connections {expected} were to be told of a failure, told: {pushed}"


def nobody_fails_without_a_cause(turn: Turn) -> str | None:
    """Only a loss, a report, a rank found dead, or a collective at its deadline tells a generation that it failed."""
    for push in turn.pushes:
        era = turn.era_at(push.connection)
        if era is not None and not era.has_failed and not turn.suspects:
            return f"connection {push.connection} was told of a failure, and nothing has happened: {_told(push)}"
    return None


def the_first_cause_is_named(turn: Turn) -> str | None:
    """Whoever is told that its generation failed is told of the rank that was the first cause, and of no other."""
    for send in turn.sends:
        era = turn.era_at(send.connection)
        if send.type is not FrameType.FAILED or send.fields[3] == LEFT_PHASE or era is None:
            continue
        culprit = send.fields[2]
        if era.blamed is not None and culprit != era.blamed:
            return f"rank {era.blamed} is the first cause, and connection {send.connection} was told rank {culprit}"
        if era.blamed is None and culprit not in turn.suspects:
            return f"rank {culprit} was named, suspects: {sorted(turn.suspects)}"
    return None


def all_are_told_the_same(turn: Turn) -> str | None:
    """The first failure of a generation stays: everybody is told the same, word for word, now and later."""
    for send in turn.sends:
        era = turn.era_at(send.connection)
        if send.type is not FrameType.FAILED or send.fields[3] == LEFT_PHASE or era is None:
            continue
        others = [push.fields[1:] for push in turn.pushes if turn.era_at(push.connection) is era]
        expected = era.verdict or (others[0] if others else send.fields[1:])
        if send.fields[1:] != expected:
            return f"connection {send.connection} was told {send.fields[1:]}, the others {expected}"
    return None


def requests_of_a_failed_generation_fail(turn: Turn) -> str | None:
    """A request that comes after the failure is answered at once, with that failure."""
    if not isinstance(turn.event, Received) or turn.era is None or not turn.era.has_failed or turn.due:
        return None
    connection, message = turn.event.connection, turn.event.message
    if message.sequence not in turn.ledger.open.get(connection, {}):
        return None
    answers = [s.type for s in turn.sends if s.connection == connection and s.type in ANSWERS]
    is_right = answers == [FrameType.FAILED]
    return None if is_right else f"{message.type.name} was answered with {answers}, expected FAILED"


def only_who_has_left_is_missed_as_left(turn: Turn) -> str | None:
    """A request fails for want of a rank that has left only where that rank has said goodbye in this generation."""
    for answer in turn.answers:
        if answer.type is not FrameType.FAILED or answer.fields[3] != LEFT_PHASE:
            continue
        era = turn.era_at(answer.connection)
        if era is None or answer.fields[2] not in era.left:
            return f"connection {answer.connection} was told that rank {answer.fields[2]} left, which it did not"
    return None


def a_barrier_releases_all_or_none(turn: Turn) -> str | None:
    """A barrier ends for all its ranks in one turn; nobody passes it alone."""
    ended: dict[tuple[str, tuple[int, ...] | None], list[int | None]] = {}
    for answer in turn.answers:
        asked = turn.asked(answer)
        if answer.type is FrameType.REPLY and asked is not None and asked.type is FrameType.EXCHANGE:
            name, ranks, _ = asked.fields
            released = ended.setdefault((name, None if ranks is None else tuple(ranks)), [])
            released.append(turn.rank_at(answer.connection))
    for (name, ranks), released in ended.items():
        era = turn.era_at(turn.answers[0].connection)
        assert era is not None
        expected = sorted(era.members) if ranks is None else list(ranks)
        if sorted(released) != expected:
            return f"barrier {name!r} needs ranks {expected}, released {released}"
    return None


def values_are_those_that_were_set(turn: Turn) -> str | None:
    """A read brings what was set last, and an exchange what each rank has brought."""
    for answer in turn.answers:
        asked, era = turn.asked(answer), turn.era_at(answer.connection)
        if asked is None or era is None or asked.type not in (FrameType.GET, FrameType.EXCHANGE):
            continue
        if answer.type is FrameType.VALUES:
            brought, expected = answer.fields[2], _brought(turn, era)
        elif answer.type is FrameType.REPLY and asked.type is FrameType.GET:
            brought, expected = answer.fields[1], _value_after(turn, era, asked.fields[0])
        else:
            continue
        if brought != expected:
            return f"{asked.type.name} of {asked.fields[0]!r} was answered with {brought!r}, expected {expected!r}"
    return None


def a_cancel_is_answered(turn: Turn) -> str | None:
    """Whoever comes to its deadline is answered in the same turn, and told of ranks that keep it waiting."""
    if not isinstance(turn.event, Received) or turn.event.message.type is not FrameType.CANCEL or turn.era is None:
        return None
    connection, sequence = turn.event.connection, turn.event.message.fields[0]
    asked = turn.ledger.open.get(connection, {}).get(sequence)
    if asked is None:
        return None
    [*answers] = [a for a in turn.answers if (a.connection, a.fields[0]) == (connection, sequence)]
    if not answers:
        return f"{asked.type.name} was cancelled, and not answered"
    if answers[0].type is FrameType.TIMED_OUT and turn.rank in answers[0].fields[1]:
        return f"rank {turn.rank} is told that it waits for itself"
    return None


def nobody_who_came_is_absent(turn: Turn) -> str | None:
    """A collective at its deadline names as missing nobody who waits in it."""
    for push in turn.pushes:
        _, kind, _, _, missing, _ = push.fields
        era = turn.era_at(push.connection)
        if kind != STUCK or era is None:
            continue
        furthest = max(era.begun.values(), default=0)
        wrongly = [rank for rank in missing if era.begun.get(rank, 0) >= furthest]
        if wrongly:
            return f"ranks {wrongly} wait in the collective that they are said to miss"
    return None


TURN_INVARIANTS: tuple[Callable[[Turn], str | None], ...] = (
    no_answer_without_a_request_and_none_twice,
    nothing_is_sent_to_who_is_gone,
    who_sits_was_awaited,
    a_generation_forms_of_all_ranks_at_once,
    each_present_member_is_told_a_failure_once,
    nobody_fails_without_a_cause,
    the_first_cause_is_named,
    all_are_told_the_same,
    requests_of_a_failed_generation_fail,
    only_who_has_left_is_missed_as_left,
    a_barrier_releases_all_or_none,
    values_are_those_that_were_set,
    a_cancel_is_answered,
    nobody_who_came_is_absent,
)


def _joins(turn: Turn, answer: Send) -> bool:
    asked = turn.asked(answer)
    return asked is not None and asked.type is FrameType.JOIN


def _message(turn: Turn) -> Message:
    """The message that brought an answer with a value: nothing else does."""
    assert isinstance(turn.event, Received)
    return turn.event.message


def _value_after(turn: Turn, era: Era, key: str) -> bytes | None:
    """Returns what a key holds once this turn's message has been taken in."""
    message, before = _message(turn), era.values.get(key)
    if message.type is FrameType.SET and message.fields[0] == key:
        return bytes(message.fields[1])
    return before


def _brought(turn: Turn, era: Era) -> list[bytes]:
    """Returns what the ranks that wait in an exchange have brought, and who has come last."""
    asked = {r: m for r, c in era.members.items() for m in turn.ledger.open.get(c, {}).values()}
    return [m.fields[2] for _, m in sorted(asked.items()) if m.type is FrameType.EXCHANGE]


def _told(send: Send) -> str:
    return f"{send.type.name} {send.fields}"
