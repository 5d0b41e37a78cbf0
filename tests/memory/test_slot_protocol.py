"""The slot pool as a model: every interleaving of single word operations, for the protocol and its wrong variants.

Slots are tried in any order, which covers the lowest-first order of the real pool. A state is wrong when somebody
writes a slot that is the head, that another one writes, or that somebody reads under protection; or when a publish
succeeds though the version that it is based on is no longer the newest.
"""

from dataclasses import dataclass, replace

import pytest

PROTOCOL = ("take", "head", "hazards")


@dataclass(frozen=True)
class Participant:
    """Where one participant is: `at` names the operation it does next."""

    at: str = "read_head"
    seen: tuple[int, int] = (0, 0)  # the head word it works with: version, slot
    slot: int = -1  # the one it tries to get, or has
    checks_done: int = 0
    next_hazard: int = 0


@dataclass(frozen=True)
class State:
    head: tuple[int, int]
    hazards: tuple[int, ...]
    owners: tuple[int, ...]
    participants: tuple[Participant, ...]


@dataclass(frozen=True)
class Model:
    num_workers: int
    num_evaluators: int
    num_slots: int
    max_version: int
    order: tuple[str, ...] = PROTOCOL
    reader_looks_again: bool = True
    tagged: bool = True

    def first_wrong(self):
        """Breadth-first search; returns what is wrong in the first wrong state, or None, and the number of states."""
        num_participants = self.num_workers + self.num_evaluators
        start = State((0, 0), (-1,) * num_participants, (-1,) * self.num_slots, (Participant(),) * num_participants)
        known, frontier = {start}, [start]
        while frontier:
            reached = []
            for state in frontier:
                for who in range(num_participants):
                    for after in self.steps(state, who):
                        wrong = after if isinstance(after, str) else self.wrong(after)
                        if wrong:
                            return wrong, len(known)
                        if after not in known:
                            known.add(after)
                            reached.append(after)
            frontier = reached
        return None, len(known)

    def wrong(self, state):
        for who, participant in enumerate(state.participants):
            if participant.at != "write":
                continue
            if participant.slot == state.head[1]:
                return "writes the head"
            for other, neighbour in enumerate(state.participants):
                if other != who and neighbour.at == "write" and neighbour.slot == participant.slot:
                    return "two write one slot"
                if neighbour.at in ("read", "try", "check", "write") and neighbour.seen[1] == participant.slot:
                    return "writes what is read"
        return None

    def same(self, one, other):
        return one == other if self.tagged else one[1] == other[1]

    def steps(self, state, who):
        """The states after one operation of this participant: several where it chooses, none where it cannot go on."""
        p = state.participants[who]
        is_worker = who < self.num_workers

        def then(p, **words):
            participants = (*state.participants[:who], p, *state.participants[who + 1 :])
            return replace(state, participants=participants, **words)

        def changed(words, index, value):
            return (*words[:index], value, *words[index + 1 :])

        match p.at:
            case "read_head":
                return [then(replace(p, at="set_hazard", seen=state.head))]
            case "set_hazard":
                at = "look_again" if self.reader_looks_again else "read"
                return [then(replace(p, at=at), hazards=changed(state.hazards, who, p.seen[1]))]
            case "look_again":
                return [then(replace(p, at="read" if self.same(state.head, p.seen) else "read_head"))]
            case "read":
                return [then(replace(p, at="try" if is_worker else "leave"))]
            case "try":
                tried = (
                    replace(p, at="check", slot=slot, checks_done=0, next_hazard=0) for slot in range(self.num_slots)
                )
                return [after for each in tried for after in self.check(state, who, each, then, changed)]
            case "check":
                return self.check(state, who, p, then, changed)
            case "write":
                return [then(replace(p, at="leave"))]
            case "leave":
                after = replace(p, at="publish") if is_worker else Participant()
                return [then(after, hazards=changed(state.hazards, who, -1))]
            case "publish":
                if not self.same(state.head, p.seen):
                    return [then(replace(p, at="give_back"))]
                if state.head != p.seen:
                    return ["an update is lost"]
                if p.seen[0] == self.max_version:
                    return []
                return [then(replace(p, at="give_back"), head=(p.seen[0] + 1, p.slot))]
            case "give_back":
                return [then(Participant(), owners=changed(state.owners, p.slot, -1))]
        raise AssertionError(p.at)

    def check(self, state, who, p, then, changed):
        """The next of the three checks of a slot; a failed one goes back to trying another slot."""
        has_taken = "take" in self.order[: p.checks_done]
        failed = then(
            replace(p, at="try", slot=-1, checks_done=0, next_hazard=0),
            **({"owners": changed(state.owners, p.slot, -1)} if has_taken else {}),
        )
        at = "write" if p.checks_done + 1 == len(self.order) else "check"
        passed = replace(p, at=at, checks_done=p.checks_done + 1, next_hazard=0)
        match self.order[p.checks_done]:
            case "take":
                if state.owners[p.slot] != -1:
                    return [failed]
                return [then(self.ready(passed), owners=changed(state.owners, p.slot, who))]
            case "head":
                return [failed if state.head[1] == p.slot else then(self.ready(passed))]
        if state.hazards[p.next_hazard] == p.slot:
            return [failed]
        if p.next_hazard + 1 < len(state.hazards):
            return [then(replace(p, next_hazard=p.next_hazard + 1))]
        return [then(self.ready(passed))]

    @staticmethod
    def ready(p):
        """A participant that writes need not remember how it came there: fewer states."""
        return replace(p, checks_done=0) if p.at == "write" else p


@pytest.mark.parametrize(
    "model",
    [
        Model(num_workers=2, num_evaluators=0, num_slots=3, max_version=3),
        Model(num_workers=2, num_evaluators=1, num_slots=3, max_version=2),
    ],
)
def test_the_protocol_is_right_in_every_interleaving(model):
    wrong, num_states = model.first_wrong()
    assert wrong is None
    assert num_states > 1000


def test_checking_before_claiming_breaks_with_two_workers():
    model = Model(num_workers=2, num_evaluators=0, num_slots=3, max_version=2, order=("head", "hazards", "take"))
    assert model.first_wrong()[0] == "writes the head"


def test_checking_hazards_before_the_head_breaks_with_two_workers_and_a_reader():
    model = Model(num_workers=2, num_evaluators=1, num_slots=3, max_version=2, order=("take", "hazards", "head"))
    assert model.first_wrong()[0] == "writes what is read"


def test_not_looking_again_at_the_head_breaks():
    model = Model(num_workers=2, num_evaluators=0, num_slots=3, max_version=3, reader_looks_again=False)
    assert model.first_wrong()[0] == "writes what is read"


def test_a_head_without_a_version_loses_updates():
    model = Model(num_workers=2, num_evaluators=0, num_slots=3, max_version=3, tagged=False)
    assert model.first_wrong()[0] == "an update is lost"
