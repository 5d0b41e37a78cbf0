"""What servers have applied, and what a worker's codec remembers, come to the gradients that were accepted."""

from random import Random
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

import paceline as pl
from algorithms.server.test_client import FIRST, SECOND, SIZE, Box
from paceline.algorithms.server import client as client_module
from paceline.algorithms.server.client import Client
from paceline.algorithms.server.pushed import PushCodec
from paceline.compression.bf16 import BFloat16
from paceline.compression.codec import NoCodec
from paceline.compression.feedback import Feedback
from paceline.compression.qsgd import QSGD
from paceline.compression.sign import Sign
from paceline.compression.ternary import Ternary
from paceline.compression.top_k import TopK
from paceline.errors import NotFiniteWarning, RunStopped
from paceline.ports.ports import Counts, Message, PeerBack, PeerLeft, Received
from paceline.simulator import Cluster

WORKERS, NUM_ELEMENTS, STEPS = 3, 40, 40
REMEMBER = ["top-k(fraction=0.1)", "sign(bucket=8)", "bf16(feedback=true)"]
FORGET = ["none", "ternary(bucket=8)", "qsgd(bits=2, bucket=8)"]
#: Of worker 2, which is late in its first steps and then as fast as the others: what servers do with its gradients.
METHODS = {
    "parameter-server(mode=ringmaster(threshold=2), codec={})": "drops",
    "parameter-server(mode=ringmaster(threshold=auto), codec={})": "drops",
    "parameter-server(mode=rennala(gradients=2), codec={})": "drops",
    "parameter-server(mode=rennala(gradients=auto), codec={})": "drops",
    "parameter-server(mode=sync(backups=1), codec={})": "drops",
    "parameter-server(mode=sync(backups=1), shards=2, codec={})": "drops",
    "parameter-server(mode=sync(backups=1, quorum=per-shard), shards=2, codec={})": "drops",
    "parameter-server(mode=sync(backups=auto), codec={})": "drops",
    "parameter-server(mode=async, shards=2, codec={})": "applies",
    "parameter-server(mode=bounded(clock_bound=3), shards=2, codec={})": "applies",
    "parameter-server(mode=ringleader, codec={})": "applies",
    "parameter-server(mode=async, apply=adaptive-revision(revision_state=snapshot, reads_kept=1), codec={})": "applies",
    "downpour(push=2, fetch=3, apply=sgd, shards=2, codec={})": "applies",
}


def gradient_of(worker, step):
    """One for each step, whose sums are exact."""
    draws = torch.Generator().manual_seed(1000 * worker + step)
    return torch.randn(NUM_ELEMENTS, generator=draws, dtype=torch.float64)


class Watched(PushCodec):
    """Notes each push: its gradient, what its servers decode of it, and which of them have dropped it."""

    made: ClassVar[list] = []

    def __init__(self, codec, ports):
        super().__init__(codec, ports)
        self.pushes, self.dropped = [], set()
        if ports.shared.ranges[-1][1]:
            Watched.made.append(self)

    def encode(self, gradient, missing=()):
        payloads, codec = super().encode(gradient, missing), self._tuner.codec
        self.pushes.append(
            [
                (gradient[begin:end].clone(), codec.decode(payload.clone(), end - begin, gradient.dtype))
                for (begin, end), payload in zip(self._ranges, payloads, strict=True)
            ]
        )
        return payloads

    def settle(self, shard, *, is_applied):
        super().settle(shard, is_applied=is_applied)
        if not is_applied:
            self.dropped.add((len(self.pushes) - 1, shard))

    def sums(self, shard):
        """Of the gradients that a shard has accepted, and of what it has decoded of them."""
        taken = [push[shard] for number, push in enumerate(self.pushes) if (number, shard) not in self.dropped]
        return tuple(sum(one[place] for one in taken) for place in (0, 1))


@pytest.fixture
def watched(monkeypatch):
    monkeypatch.setattr(client_module, "PushCodec", Watched)
    monkeypatch.setattr(Watched, "made", [])
    return Watched.made


def simulated(algorithm):
    """Constant gradients; worker 2 is late in its first 10 steps, and has more of them."""
    final = {}

    def loop():
        weights = torch.nn.ParameterList([torch.zeros(NUM_ELEMENTS, dtype=torch.float64)])
        optimizer = torch.optim.SGD(weights.parameters(), lr=1.0)
        with pl.attach(weights, optimizer) as worker:
            for step in range(STEPS):
                optimizer.zero_grad()
                (weights[0] @ gradient_of(worker.worker_id, step)).backward()
                optimizer.step()
        final[worker.worker_id] = weights[0].detach().clone()

    faults = pl.Faults().slow(worker=2, factor=2.6, step=1).slow(worker=2, factor=0.7, step=11)
    cluster = Cluster(workers=WORKERS, compute_s=1.0, slowness=((1, 1.15),))
    run = pl.simulate(loop, workers=WORKERS, algorithm=algorithm, cluster=cluster, faults=faults)
    return final[0], run


@pytest.mark.filterwarnings("ignore:The servers apply gradients by adaptive-revision")
@pytest.mark.parametrize(
    ("method", "codec"),
    [(method, REMEMBER[number % 3]) for number, method in enumerate(METHODS)]
    + [(next(iter(METHODS)), codec) for codec in (*REMEMBER[1:], *FORGET)],
)
def test_applied_plus_remembered_is_what_was_accepted(method, codec, watched):
    _, run = simulated(method.format(codec))
    assert len(watched) == WORKERS
    dropped = sum(len(own.dropped) for own in watched)
    assert dropped > 3 if METHODS[method] == "drops" else not dropped
    assert (run.result["dropped_updates"] > 3) == (METHODS[method] == "drops")
    for own in watched:
        for shard, feedback in enumerate(own.feedbacks):
            accepted, applied = own.sums(shard)
            if feedback.memory is not None:
                torch.testing.assert_close(applied + feedback.memory, accepted, rtol=0, atol=1e-11)
                assert feedback.memory.any()
            elif codec == "none":
                assert torch.equal(applied, accepted)


@pytest.mark.parametrize("codec", REMEMBER)
@pytest.mark.parametrize("method", [one for one in METHODS if "ringmaster" in one or "downpour" in one])
def test_parameters_and_memories_come_to_the_gradients_of_the_steps_that_the_run_has_recorded(method, codec, watched):
    final, run = simulated(method.format(codec))
    accepted = torch.zeros(NUM_ELEMENTS, dtype=torch.float64)
    for worker, records in run.records.items():
        for step, version in enumerate(records["applied_version"].tolist()):
            accepted += gradient_of(worker, step) * (version > 0)
    remembered = sum(torch.cat([feedback.memory for feedback in own.feedbacks]) for own in watched)
    at = sum(torch.cat([own.sums(shard)[0] for shard in range(len(own._ranges))]) for own in watched).nonzero()[0]
    remembered = remembered[at : at + NUM_ELEMENTS]
    torch.testing.assert_close(-final + remembered, accepted, rtol=0, atol=1e-11)
    assert not torch.allclose(-final, accepted, rtol=0, atol=1e-4)


# One worker of two shards, whose servers' answers are scripted.

CODECS = [TopK(fraction=0.25), Sign(bucket=8), BFloat16(feedback=True)]
WITHOUT_MEMORY = [NoCodec(), BFloat16(), Ternary(bucket=8), QSGD(bits=2, bucket=8)]
DROPPED, APPLIED, COUNTED = -1, 1, 0


class Payloads(Box):
    """Keeps what was sent to which shard under which number."""

    def __init__(self, script):
        super().__init__(script)
        self.payloads = []

    def send(self, to, message):
        super().send(to, message)
        if message.kind in ("push", "push-only"):
            self.payloads.append((to - FIRST, message.number, message.x.clone()))

    def receive(self, timeout_s=None, sender=None):
        event = super().receive(timeout_s, sender)
        if isinstance(event, Exception):
            raise event
        return event


class OneShard:
    """What a shard's server decodes: each number once."""

    def __init__(self, codec, box, shard):
        self.codec, self.box, self.shard = codec, box, shard

    def decoded(self, *numbers):
        sent = {number: x for shard, number, x in self.box.payloads if shard == self.shard}
        return sum((self.codec.decode(sent[one], SIZE, torch.float64) for one in numbers), torch.zeros(SIZE))


def worker_with(codec, *script, storage=None, incarnation=0):
    box = Payloads(script)
    ports = SimpleNamespace(
        mailbox=box, incarnation=incarnation, storage=storage, worker_id=0, num_workers=2, num_servers=2,
        shared=SimpleNamespace(x=torch.zeros(2 * SIZE, dtype=torch.float64), ranges=((0, SIZE), (SIZE, 2 * SIZE))),
        moved=lambda _: None, codec_moves={}, clock=SimpleNamespace(now_s=lambda: box.now_s), counts=Counts(),
        random=Random(3), decided=lambda *_, **__: None,
    )  # fmt: skip
    client = Client(ports, codec)
    return client, [OneShard(codec, box, shard) for shard in range(2)], box


def answer(server, number, verdict):
    return Received(server, 0, Message("x", number, verdict, torch.zeros(SIZE, dtype=torch.float64), 1))


def pushes(client, count, first=0):
    for number in range(first, first + count):
        client.push(pushed(number), 1)


def pushed(number):
    draws = torch.Generator().manual_seed(number)
    return torch.randn(2 * SIZE, generator=draws, dtype=torch.float64)


def memories(client):
    return [one.memory for one in client._push_codec.feedbacks]


def check(client, shards, *accepted):
    """Each shard's numbers that it has accepted, from 1."""
    for shard, memory, numbers in zip(shards, memories(client), accepted, strict=True):
        own = slice(SIZE * shard.shard, SIZE * (shard.shard + 1))
        total = sum((pushed(one - 1)[own] for one in numbers), torch.zeros(SIZE))
        torch.testing.assert_close(shard.decoded(*numbers) + memory, total, rtol=0, atol=1e-14)


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_each_shard_decides_for_its_own_part(codec):
    verdicts = [(APPLIED, DROPPED), (DROPPED, DROPPED), (COUNTED, APPLIED), (APPLIED, APPLIED), (DROPPED, COUNTED)]
    script = [
        answer(server, number, verdict)
        for number, both in enumerate(verdicts, 1)
        for server, verdict in zip((FIRST, SECOND), both, strict=True)
    ]
    client, shards, _ = worker_with(codec, *script)
    pushes(client, len(verdicts))
    check(client, shards, [1, 3, 4], [3, 4, 5])


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_a_dropped_push_leaves_every_bit_of_the_memory(codec):
    client, _, _ = worker_with(
        codec, *(answer(server, n, v) for n, v in ((1, APPLIED), (2, DROPPED)) for server in (FIRST, SECOND))
    )
    pushes(client, 1)
    before = [one.clone() for one in memories(client)]
    assert all(one.any() for one in before)
    pushes(client, 1, first=1)
    assert all(map(torch.equal, memories(client), before))


@pytest.mark.parametrize("verdict", [APPLIED, DROPPED])
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_what_is_sent_again_to_a_successor_is_coded_once_and_counts_once(codec, verdict):
    """The first answer is lost with its server; another is given twice; a third one is damaged on its way."""
    damaged = Received(SECOND, 0, Message("x", 3, -7, torch.zeros(SIZE, dtype=torch.float64), 1))
    client, shards, box = worker_with(
        codec, answer(FIRST, 1, APPLIED), PeerLeft(SECOND, 0, "killed"), PeerBack(SECOND, 1), answer(SECOND, 1, APPLIED),
        answer(SECOND, 2, verdict), answer(SECOND, 2, verdict), answer(FIRST, 2, APPLIED),
        damaged, answer(SECOND, 3, verdict), answer(FIRST, 3, APPLIED),
        answer(FIRST, 4, APPLIED), answer(SECOND, 4, APPLIED),
    )  # fmt: skip
    pushes(client, 4)
    again = [x for shard, number, x in box.payloads if (shard, number) in ((1, 1), (1, 3))]
    assert len(again) == 4
    assert torch.equal(again[0], again[1])
    assert torch.equal(again[2], again[3])
    check(client, shards, [1, 2, 3, 4], [1, 2, 3, 4] if verdict == APPLIED else [1, 4])


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_a_push_that_nobody_has_answered_when_the_run_stops_counts_as_dropped(codec):
    """Its server has died, and has no successor: what it had not answered is in no snapshot."""
    kept = {}
    storage = SimpleNamespace(restore=lambda: None, keep=lambda state, version: kept.update(state=state))
    client, shards, _ = worker_with(
        codec, answer(FIRST, 1, APPLIED), answer(SECOND, 1, APPLIED),
        answer(FIRST, 2, APPLIED), PeerLeft(SECOND, 0, "killed"), RunStopped("over"), storage=storage,
    )  # fmt: skip
    pushes(client, 1)
    with pytest.raises(RunStopped):
        pushes(client, 1, first=1)
    check(client, shards, [1, 2], [1])
    assert all(map(torch.equal, kept["state"]()["memories"], memories(client)))


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_a_checkpoint_between_a_dropped_and_an_accepted_push_goes_on(codec):
    def verdicts(first, *those):
        return [answer(server, n, v) for n, v in enumerate(those, first) for server in (FIRST, SECOND)]

    kept = {}
    storage = SimpleNamespace(restore=lambda: None, keep=lambda state, version: kept.update(state=state))
    client, shards, _ = worker_with(codec, *verdicts(1, APPLIED, DROPPED, APPLIED, APPLIED), storage=storage)
    pushes(client, 2)
    state = kept["state"]()
    state["memories"] = [one.clone() for one in state["memories"]]
    pushes(client, 2, first=2)
    check(client, shards, [1, 3, 4], [1, 3, 4])
    resumed, _, _ = worker_with(
        codec, *verdicts(1, APPLIED, APPLIED), storage=SimpleNamespace(restore=lambda: state, keep=lambda *_: None)
    )
    pushes(resumed, 2, first=2)
    assert all(map(torch.equal, memories(resumed), memories(client)))


@pytest.mark.parametrize("codec", WITHOUT_MEMORY, ids=str)
def test_a_codec_that_remembers_nothing_has_nothing_to_settle(codec):
    client, _, _ = worker_with(
        codec, *(answer(server, n, v) for n, v in ((1, DROPPED), (2, APPLIED)) for server in (FIRST, SECOND))
    )
    pushes(client, 2)
    assert memories(client) == [None, None]


@pytest.mark.parametrize("codec", [BFloat16(feedback=True), Sign(bucket=8)], ids=str)
def test_where_one_shard_cannot_code_its_part_no_shard_gets_any(codec):
    """The gradient is finite and too large for the codec's numbers: its other shard's part would be half a step."""
    client, shards, _ = worker_with(codec, *(answer(server, n, APPLIED) for n in (1, 2) for server in (FIRST, SECOND)))
    pushes(client, 1)
    before = [one.clone() for one in memories(client)]
    large = pushed(1)
    large[SIZE:] = 1e300
    with pytest.warns(NotFiniteWarning):
        client.push(large, 1)
    assert not any(shard.decoded(2).any() for shard in shards)
    assert all(map(torch.equal, memories(client), before))


def test_an_encoding_that_was_never_settled_is_forgotten():
    feedback, codec = Feedback(TopK(fraction=0.5), 4, torch.float64), TopK(fraction=0.5)
    feedback.encode(codec, torch.tensor([4.0, 3.0, 2.0, 1.0], dtype=torch.float64), 0)
    feedback.encode(codec, torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64), 0)
    feedback.settle(is_applied=True)
    feedback.settle(is_applied=False)  # said too late: it has been applied
    assert feedback.memory is not None
    assert feedback.memory.tolist() == [1.0, 2.0, 0.0, 0.0]
