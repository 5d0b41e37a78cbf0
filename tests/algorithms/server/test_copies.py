"""A shard and its second copy with scripted mailboxes: dead at every message of the log, with every kind of state."""

from types import SimpleNamespace

import pytest
import torch

from paceline.algorithms.server.adagrad import AsyncAdagrad
from paceline.algorithms.server.adaptive_revision import AdaptiveRevision
from paceline.algorithms.server.admission import Admission, Clocks, Quorum
from paceline.algorithms.server.apply import SGD, Momentum
from paceline.algorithms.server.delay import ConstantDelay
from paceline.algorithms.server.delayed import Delayed
from paceline.algorithms.server.served import ShardRules
from paceline.algorithms.server.standby import serve_shard
from paceline.algorithms.server.user import UserOptimizer
from paceline.compression.codec import NoCodec
from paceline.errors import PeerLostError
from paceline.memory.served import PrivateShard
from paceline.optim.settings import settings_of
from paceline.ports.ports import Message, PeerBack, PeerLeft, Received, ServerPorts

WORKERS, SIZE = 2, 5
SERVER, COPY = WORKERS, WORKERS + 1
ADAM = settings_of(torch.optim.Adam([torch.nn.Parameter(torch.zeros(SIZE))], lr=0.1), lambda _: (0, SIZE))
PUSHES = [(number % WORKERS, 1 + number // WORKERS) for number in range(10)]  # whose, and its sequence number


class Memory(PrivateShard):
    """A server's memory, and the word that outlives it."""

    def __init__(self):
        super().__init__(SIZE, torch.float32, ((0, SIZE),))
        self.named = None

    def name_copy(self, incarnation):
        self.named = incarnation


class Workers:
    """What the workers know: the answers that they got."""

    def __init__(self):
        self.versions, self.echoes, self.answered = {}, {}, 0

    def copy(self):
        other = Workers()
        other.versions, other.echoes, other.answered = dict(self.versions), dict(self.echoes), self.answered
        return other

    def events(self):
        """Takes part, pushes what was not answered, and leaves."""
        for worker in range(WORKERS):
            yield Received(worker, 0, Message("settings", x=ADAM.to_tensor()))
            if worker not in self.versions:
                yield Received(worker, 0, Message("join"))
        while self.answered < len(PUSHES):
            worker, sequence = PUSHES[self.answered]
            if worker in self.echoes:
                yield Received(worker, 0, Message("echo", sequence, x=self.echoes[worker].clone()))
            generator = torch.Generator().manual_seed(self.answered)
            g = torch.randn(SIZE, generator=generator)
            yield Received(worker, 0, Message("push", sequence, 1, g, self.versions[worker]))
        for worker in range(WORKERS):
            yield Received(worker, 0, Message("bye"))
            yield PeerLeft(worker, 0, "ended")

    def hear(self, worker, message):
        if message.kind == "echo":
            self.echoes[worker] = message.x
        elif message.kind == "x":
            self.versions[worker] = message.version
            self.answered += message.number > 0


class ServersBox:
    """A server's mailbox; its copy confirms whatever it is sent, when the server waits for that."""

    def __init__(self, workers, *, has_copy=True, events=None):
        self.workers = workers
        self.log, self.known_then, self.confirmed, self.has_copy = [], [], 0, has_copy
        self.memory = Memory()
        self.events = events(self) if events is not None else workers.events()

    def peers(self):
        return {COPY} if self.has_copy else set()

    def send(self, to, message):
        message = message._replace(x=None if message.x is None else message.x.clone())
        if to != COPY:
            has_all = self.memory.named is None or self.confirmed == len(self.log)
            assert has_all, "it answers before the copy has all that it did"
            self.workers.hear(to, message)
            return
        self.log.append(message)
        self.known_then.append(self.workers.copy())

    def receive(self, timeout_s=None, *, sender=None):
        if sender == COPY:
            if self.confirmed == len(self.log):
                return None
            self.confirmed = len(self.log)
            return Received(COPY, 7, Message("copy-has", self.log[-1].number))
        return next(self.events)


def ports(worker_id, shared, box, promoted=None):
    nothing = SimpleNamespace()
    return ServerPorts(
        worker_id=worker_id,
        num_workers=WORKERS,
        clock=nothing,
        random=nothing,
        shared=shared,
        staleness=nothing,
        mailbox=box,
        num_servers=1,
        copies=True,
        promoted=promoted,
    )


def serve(box, rule, admission=Admission):
    rules = ShardRules(admission=lambda _: admission(), apply=rule, codec=NoCodec())
    with torch.no_grad():
        serve_shard(0, rules, ports(SERVER, box.memory, box))
    return box.memory


def follow(log, box, rule, admission=Admission):
    """A copy that gets these messages, and then takes over with `box`; returns the memory that it serves in, and its words."""
    rules = ShardRules(admission=lambda _: admission(), apply=rule, codec=NoCodec())
    left, memory, confirmed = list(log), box.memory, []
    copys = SimpleNamespace(
        receive=lambda timeout_s, sender: left.pop(0) if left else None,
        send=lambda to, message: confirmed.append(message.number),
    )

    def promoted():
        return None if left else ports(SERVER, memory, box)

    left = [Received(SERVER, 0, one) if isinstance(one, Message) else one for one in left]
    with torch.no_grad():
        serve_shard(0, rules, ports(COPY, PrivateShard(SIZE, torch.float32, ((0, SIZE),)), copys, promoted))
    return memory, confirmed


RULES = [
    UserOptimizer(),
    SGD(),
    Momentum(),
    AsyncAdagrad(),
    AdaptiveRevision(),
    AdaptiveRevision(revision_state="snapshot"),
    Delayed(delay=ConstantDelay(updates_late=2), rule=Momentum()),
]


@pytest.mark.parametrize("rule", RULES, ids=[type(rule).__name__ for rule in RULES])
def test_wherever_the_server_dies_the_copy_goes_on_bit_for_bit(rule):
    """It dies after every single message of its log; the workers resend what was not answered."""
    whole = ServersBox(Workers())
    expected = serve(whole, rule)
    assert expected.version == len(PUSHES)
    begun = next(place for place, message in enumerate(whole.log) if message.kind == "copy-settings")
    for died_after in range(begun, len(whole.log) + 1):
        known = whole.known_then[min(died_after, len(whole.log) - 1)].copy()
        later = ServersBox(known, has_copy=False)
        memory, _ = follow(whole.log[:died_after], later, rule)
        assert memory.version == expected.version, died_after
        assert torch.equal(memory.x, expected.x), died_after


@pytest.mark.parametrize("rule", RULES, ids=[type(rule).__name__ for rule in RULES])
def test_a_copy_that_comes_in_the_middle_gets_everything(rule):
    def events(box):
        for number, event in enumerate(box.workers.events()):
            if number == 13:
                box.events_at_return = len(box.log)
                yield PeerLeft(COPY, 0, "killed")
                yield PeerBack(COPY, 1)
            if number == 16:
                assert box.memory.named is None
                box.confirmed = len(box.log)
                yield Received(COPY, 1, Message("copy-has", box.log[-1].number))
                assert box.memory.named == 1
            yield event

    whole = ServersBox(Workers(), events=events)
    expected = serve(whole, rule)
    log = whole.log[whole.events_at_return :]
    assert log[0].kind == "copy-state"
    # The copy before did not hear of it; the new one dies with its server, at the end of the log.
    later = ServersBox(whole.known_then[-1].copy(), has_copy=False)
    memory, confirmed = follow(log, later, rule)
    assert torch.equal(memory.x, expected.x)
    assert confirmed[-1] == log[-1].number


def test_the_clocks_are_handed_over():
    """Worker 1 came late, at the slowest clock."""
    made = []

    def bounded():
        made.append(Clocks(3, range(WORKERS)))
        return made[-1]

    def events(box):
        for worker in range(WORKERS):
            yield Received(worker, 0, Message("settings", x=ADAM.to_tensor()))
        for sequence in (1, 2):
            yield Received(0, 0, Message("push", sequence, 1, torch.ones(SIZE), 0))
        yield PeerLeft(1, 0, "killed")
        yield PeerBack(1, 1)
        yield Received(1, 1, Message("join"))
        yield Received(1, 1, Message("push", 3, 1, torch.ones(SIZE), 0))  # its join is answered with clock 2
        seen.update(made[0].clocks)
        yield from ENDS

    seen = {}
    whole = ServersBox(Workers(), events=events)
    serve(whole, SGD(), bounded)
    end = next(place for place, message in enumerate(whole.log) if message.kind == "copy-bye")

    def look(_):
        assert made[-1].clocks == seen
        yield from ENDS

    follow(whole.log[:end], ServersBox(Workers(), has_copy=False, events=look), SGD(), bounded)
    assert seen == {0: 2, 1: 3}


ENDS = [one for w in range(WORKERS) for one in (Received(w, 0, Message("bye")), PeerLeft(w, 0, "ended"))]


def test_after_a_gap_nothing_is_confirmed_until_the_state_comes_again():
    whole = ServersBox(Workers())
    serve(whole, SGD())
    gap = next(place for place, message in enumerate(whole.log) if message.kind == "copy-mean") + 1
    log = whole.log[:gap] + whole.log[gap + 3 :]
    _, confirmed = follow(log, ServersBox(Workers(), has_copy=False, events=lambda _: iter(ENDS)), SGD())
    assert confirmed[-2:] == [gap, -1], "it asks for the state, once"
    again = [one._replace(number=1000 + place) for place, one in enumerate(whole.log[:3])]
    _, confirmed = follow([*log, *again], ServersBox(Workers(), has_copy=False, events=lambda _: iter(ENDS)), SGD())
    assert confirmed[-1] >= 1000


def test_the_word_names_the_copy_only_while_it_has_everything():
    named = []

    def events(box):
        for number, event in enumerate(box.workers.events()):
            named.append(box.memory.named)
            if number == 10:
                box.has_copy = False
                yield PeerLeft(COPY, 7, "killed")
            elif number == 14:
                box.has_copy = True
                yield PeerBack(COPY, 8)
            yield event

    serve(ServersBox(Workers(), events=events), SGD())
    assert named[:10] == [7] * 10
    assert set(named[11:15]) == {None}


def test_a_copy_that_took_nothing_for_too_long_gets_the_state_once_it_does_again():
    """The server gave up sending to it, but it has not left: no event says that it is back."""
    named = []

    def events(box):
        send = box.send

        def full(to, message):
            if to == COPY:
                raise PeerLostError(COPY, "it has taken no message for 10 s")
            send(to, message)

        for number, event in enumerate(box.workers.events()):
            box.send = full if 10 <= number < 14 else send
            if number in (14, 16):
                box.confirmed = len(box.log)
                yield Received(COPY, 7, Message("copy-has", box.log[-1].number))
            named.append(box.memory.named)
            yield event

    whole = ServersBox(Workers(), events=events)
    serve(whole, SGD())
    assert named == [7] * 11 + [None] * 5 + [7] * (len(named) - 16)
    assert [one.kind for one in whole.log].count("copy-state") == 2


@pytest.mark.parametrize("queued", [True, False])
def test_a_copy_gets_the_state_once_however_it_is_heard_of(queued):
    """It came late, and that is both known and told; or it was there first, and nothing is told."""

    class Box(ServersBox):
        def receive(self, timeout_s=None, *, sender=None):
            if sender == COPY and told:
                return told.pop()
            return super().receive(timeout_s, sender=sender)

    told = [PeerBack(COPY, 7)] if queued else []
    whole = Box(Workers())
    serve(whole, SGD())
    assert [one.kind for one in whole.log].count("copy-state") == 1


def test_gradients_of_a_quorum_that_was_not_complete_are_asked_for_again():
    """Worker 0's gradient waited at the server when it died: the copy knows nothing of it, and makes the step once."""

    def begun(box):
        yield from (Received(w, 0, Message("settings", x=ADAM.to_tensor())) for w in range(WORKERS))
        yield Received(0, 0, Message("push", 1, 1, torch.ones(SIZE), 0))
        yield from ENDS

    def sync():
        return Quorum(WORKERS, range(WORKERS))

    def resent(box):
        for worker, value in ((0, 1.0), (0, 1.0), (1, 3.0)):
            yield Received(worker, 0, Message("push", 1, 1, torch.full((SIZE,), value), 0))
        yield from ENDS

    whole = ServersBox(Workers(), events=begun)
    serve(whole, SGD(), sync)
    cut = next(place for place, message in enumerate(whole.log) if message.kind == "copy-bye")
    memory, _ = follow(whole.log[:cut], ServersBox(Workers(), has_copy=False, events=resent), SGD(), sync)
    assert memory.version == 1
    assert memory.x.tolist() == pytest.approx([-0.2] * SIZE)
