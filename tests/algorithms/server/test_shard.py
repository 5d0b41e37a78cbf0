"""A shard's program with a scripted mailbox: duplicates, strangers' messages, answers, and what a successor is left with."""

import itertools
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import paceline as pl
from paceline.algorithms.server.admission import Admission, Clocks, Follower, Quorum
from paceline.algorithms.server.apply import SGD
from paceline.algorithms.server.served import ShardRules
from paceline.algorithms.server.shard import Shard
from paceline.algorithms.server.user import UserOptimizer
from paceline.compression.codec import NoCodec
from paceline.optim.flat_optimizer import FlatOptimizer
from paceline.optim.settings import OptimizerSettings, settings_of
from paceline.ports.ports import Message, PeerLeft, Received
from paceline.worker.server_process import ServerStorage

SETTINGS = settings_of(torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=1.0), lambda _: (0, 3))


class Storage:
    def __init__(self, state=None):
        self.state, self.kept = state, []

    def restore(self):
        return self.state

    def keep(self, state, version):
        self.kept.append(state())

    def checkpoint(self, state, number):
        self.last = state()


def serve(
    arrivals, *, workers=2, admission=None, rule=None, storage=None, x=None, version=0, on_death="shrink", look=None
):
    """Runs a shard over what arrives; everybody leaves at the end. Returns its vector and what it sent."""
    counts = dict.fromkeys(("dropped", "duplicate", "incomplete", "backups", "malformed", "held"), 0)
    shared = SimpleNamespace(x=torch.zeros(3) if x is None else x, version=version, ranges=((0, 3),), counts=counts)
    shared.writing = lambda part: torch.no_grad()

    def advance():
        shared.version += 1
        return shared.version

    def count(what, number=1):
        counts[what] += number

    shared.advance, shared.count = advance, count
    sent = []
    ends = [one for w in range(workers) for one in (Received(w, 9, Message("bye")), PeerLeft(w, 9, "ended"))]
    queue = itertools.chain(arrivals, ends)

    def send(to, message):
        sent.append((to, message._replace(x=None if message.x is None else message.x.clone())))
        if look is not None:
            look()

    mailbox = SimpleNamespace(
        receive=lambda timeout_s=None, **_: next(queue), send=send, peers=lambda: set(range(workers))
    )
    ports = SimpleNamespace(
        mailbox=mailbox, shared=shared, num_workers=workers, num_servers=1, storage=storage, copies=False,
        moved=lambda _: None, codec_moves={},
    )  # fmt: skip
    rules = ShardRules(
        admission=lambda _: admission or Admission(), apply=rule or SGD(), codec=NoCodec(), on_death=on_death
    )
    Shard(0, rules, ports).run()
    return shared, sent


def settings(worker=0, incarnation=0):
    return Received(worker, incarnation, Message("settings", x=SETTINGS.to_tensor()))


def push(worker, sequence, value, version=0, incarnation=0, samples=1):
    return Received(worker, incarnation, Message("push", sequence, samples, torch.full((3,), float(value)), version))


def test_a_duplicate_is_answered_and_not_applied():
    shared, sent = serve([settings(), push(0, 1, 1), push(0, 1, 1), push(0, 2, 10, 1), push(0, 1, 1)])
    assert shared.x.tolist() == [-11.0] * 3
    assert shared.counts["duplicate"] == 2
    assert [(m.number, m.weight, m.version) for _, m in sent] == [(1, 1, 1), (1, 1, 1), (2, 2, 2), (1, 2, 2)]


@pytest.mark.parametrize("rule", [SGD(), UserOptimizer()])
def test_an_answer_finds_room_where_the_gradient_was(rule):
    """At most one message of a worker is in memory: its gradient, or what it is sent."""
    given, alive = [], []

    def gradient():
        x = torch.ones(3)
        given.append(weakref.ref(x))
        return x

    def arrivals():
        yield settings()
        for sequence in (1, 2, 3):
            yield Received(0, 0, Message("push", sequence, 1, gradient(), sequence - 1))

    serve(arrivals(), rule=rule, look=lambda: alive.append(sum(one() is not None for one in given)))
    assert alive == [0, 0, 0]


def test_checkpoints_that_nobody_wants_copy_nothing():
    storage = ServerStorage(0, SimpleNamespace(shared=None), None, 5.0, None, None)
    storage.checkpoint(lambda: pytest.fail("a state was put together"), None)


def test_a_snapshot_copies_the_optimizers_state_once(monkeypatch):
    """And what it holds is not changed by later updates."""
    adam, copied = settings_of(torch.optim.Adam([torch.nn.Parameter(torch.zeros(3))]), lambda _: (0, 3)), []
    clone = torch.Tensor.clone
    monkeypatch.setattr(torch.Tensor, "clone", lambda self: copied.append(tuple(self.shape)) or clone(self))
    storage = Storage()
    told = Received(0, 0, Message("settings", x=adam.to_tensor()))
    serve([told, push(0, 1, 1), push(0, 2, 5)], rule=UserOptimizer(), storage=storage)
    first, last = (kept["rule"]["exp_avg"] for kept in (storage.kept[2], storage.kept[-1]))
    assert first.tolist() == pytest.approx([0.1] * 3)
    assert last.tolist() == pytest.approx([0.59] * 3)
    answers = 2
    assert copied.count((3,)) == len(storage.kept) + 1 + answers, "of the parameters, for each state and each answer"


def test_a_push_that_asks_for_no_parameters_gets_none():
    """Downpour pushes more often than it fetches; what is sent again after a push is answered as it was."""

    def push_only(*arguments, **keywords):
        received = push(*arguments, **keywords)
        return received._replace(message=received.message._replace(kind="push-only"))

    fetch = Received(0, 0, Message("fetch", -2))
    shared, sent = serve(
        [settings(), push_only(0, 1, 1), push_only(0, 1, 1), fetch, push(0, 2, 10, 1), push(0, 2, 10, 1)]
    )
    assert shared.x.tolist() == [-11.0] * 3
    assert [(m.kind, m.number, m.weight, m.version) for _, m in sent] == [
        ("ack", 1, 1, 1),
        ("ack", 1, 1, 1),
        ("x", -2, 0, 1),
        ("x", 2, 2, 2),
        ("x", 2, 2, 2),
    ]
    assert [m.x is None for _, m in sent] == [True, True, False, False, False]


def test_a_new_process_counts_from_1_again_and_its_predecessor_is_refused():
    shared, _ = serve([settings(), push(0, 5, 1), push(0, 1, 10, 1, incarnation=1), push(0, 6, 100, 2)])
    assert shared.x.tolist() == [-11.0] * 3


def test_a_gradient_that_waits_for_others_is_not_counted_twice():
    arrivals = [settings(0), settings(1), push(0, 1, 2), push(0, 1, 2), push(1, 1, 4)]
    shared, sent = serve(arrivals, admission=Quorum(2, range(2)))
    assert shared.x.tolist() == [-3.0] * 3
    assert [to for to, _ in sent] == [0, 1]


def choice(step, *workers):
    return Received(2, 0, Message("choice", step, x=torch.tensor(workers, dtype=torch.int64)))


def test_a_step_ends_without_what_died_with_a_worker():
    """This server came when worker 0 had died already; its next process was told the next step by another shard."""
    arrivals = [settings(1), push(1, 1, 2), choice(0, 0, 1), Received(0, 1, Message("join"))]
    follower = Follower(2, range(2))
    shared, sent = serve([*arrivals, Received(0, 1, Message("fetch", -2, version=1))], admission=follower)
    assert shared.x.tolist() == [-2.0] * 3
    assert [(to, m.number, m.version) for to, m in sent] == [(0, 0, 0), (1, 1, 1), (0, -2, 1)]
    assert shared.counts["incomplete"] == 1


def test_a_gradient_that_waited_and_was_not_chosen_is_dropped():
    """At a shard that follows: all three were there before the first shard had said which two."""
    chosen = Received(3, 0, Message("choice", 0, x=torch.tensor([0, 2])))
    told = [settings(worker) for worker in range(3)]
    shared, sent = serve(
        [*told, *(push(worker, 1, 10**worker) for worker in range(3)), chosen],
        workers=3,
        admission=Follower(2, range(3)),
    )
    assert shared.x.tolist() == [-50.5] * 3
    assert {to: message.weight for to, message in sent} == {0: 1, 1: -1, 2: 1}
    assert shared.counts["dropped"] == 1


def test_a_step_whose_gradients_are_all_lost_ends_without_an_update():
    arrivals = [settings(0), choice(0, 1), PeerLeft(1, 0, "killed"), push(0, 1, 5, 1)]
    shared, _ = serve(arrivals, admission=Follower(2, range(2)), on_death="shrink")
    assert (shared.version, shared.x.tolist()) == (1, [0.0] * 3)


def test_a_worker_that_was_taken_for_dead_and_sends_again_takes_part_again():
    admission = Clocks(0, range(2))
    arrivals = [settings(0), settings(1), push(0, 1, 1), PeerLeft(0, 0, "broke"), push(0, 1, 1), push(1, 1, 1)]

    def look():
        seen.append(dict(admission.clocks))

    seen = []
    serve(arrivals, admission=admission, look=look)
    assert {0: 1, 1: 1} in seen


@pytest.mark.parametrize(("met", "clock"), [(False, 0), (True, 1)])
def test_a_join_that_is_repeated_moves_no_clock(met, clock):
    """A worker repeats it when it hears that the server can be reached. After a meeting, it begins where the others are."""
    admission, join, seen = Clocks(1, range(2)), Received(1, 0, Message("join")), []
    meeting = [Received(1, 0, Message("meet", 1))] if met else []
    arrivals = [settings(0), join, push(0, 1, 1), *meeting, join, push(0, 2, 1, 1)]
    serve(arrivals, admission=admission, look=lambda: seen.append(dict(admission.clocks)))
    assert [clocks for clocks in seen if len(clocks) == 2][-1][1] == clock


def test_a_worker_says_where_it_is_to_a_server_that_cannot_know():
    """Its update 3 died with this server's predecessor, which had answered it."""
    admission = Clocks(0, range(2))
    said = Received(0, 0, Message("clock", 3))
    _, sent = serve([settings(1), push(1, 3, 1), said], admission=admission)
    assert [(to, m.number) for to, m in sent] == [(1, 3)], "worker 1 need not wait for worker 0"


def test_means_are_weighted_by_samples():
    arrivals = [settings(0), settings(1), push(0, 1, 2, samples=1), push(1, 1, 10, samples=3)]
    shared, _ = serve(arrivals, admission=Quorum(2, range(2)))
    assert shared.x.tolist() == [-8.0] * 3


def test_what_no_worker_sends_is_ignored():
    serve([Received(0, 0, Message("nonsense", 3)), Received(1, 0, Message("choice", 1, x=torch.tensor([0])))])


@pytest.mark.parametrize("rule", [SGD(), UserOptimizer()])
def test_a_successor_goes_on_from_the_snapshot_and_knows_what_is_in_it(rule):
    """Update 1 of worker 0 is in it: sent again it is a duplicate. Update 2 was lost: sent again it is applied."""
    storage = Storage()
    serve([settings(), push(0, 1, 1)], rule=rule, storage=storage)
    state = next(kept for kept in storage.kept if kept["version"] == 1)
    assert state["x"].tolist() == [-1.0] * 3
    arrivals = [settings(), push(0, 1, 1), push(0, 2, 10, 1)]
    shared, sent = serve(arrivals, rule=rule, storage=Storage(state), x=state["x"].clone(), version=2)
    assert shared.x.tolist() == [-11.0] * 3
    assert [(m.number, m.weight, m.version) for _, m in sent] == [(1, 1, 2), (2, 3, 3)]


def test_a_gradient_before_its_settings_is_left_until_it_comes_again():
    """A worker that was computing when the server was replaced: it has told the dead one, and sends both again."""
    shared, sent = serve([push(0, 1, 1), settings(), push(0, 1, 1)])
    assert shared.x.tolist() == [-1.0] * 3
    assert shared.counts["duplicate"] == 0
    assert [message.number for _, message in sent] == [1]


def test_a_successor_knows_the_workers_settings():
    storage = Storage()
    serve([settings(), push(0, 1, 1)], storage=storage)
    state = next(kept for kept in storage.kept if kept["version"] == 1)
    shared, _ = serve([push(0, 2, 10, 1)], storage=Storage(state), x=state["x"].clone(), version=1)
    assert shared.x.tolist() == [-11.0] * 3


def test_a_death_ends_the_run_where_that_is_wished():
    with pytest.raises(pl.WorkerLostError, match="worker 1 has left"):
        serve([settings(), PeerLeft(1, 0, "its connection broke")], on_death="fail")


@pytest.mark.parametrize(
    "kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.NAdam]
)
def test_the_users_optimizer_in_parts_is_the_whole_one_bit_for_bit(kind):
    """Two groups, whose rates a scheduler changes; parts that cut a parameter in two; state handed over half-way."""
    extra = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    shapes, offsets = [(2, 3), (5,), (4,)], [0, 8, 16]
    torch.manual_seed(0)
    own = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    optimizer = kind([{"params": own[:2]}, {"params": own[2:], "lr": 0.5, "weight_decay": 0.1}], lr=0.1, **extra)
    where = {p: (offset, offset + p.numel()) for p, offset in zip(own, offsets, strict=True)}
    x = torch.zeros(24)
    for p, (begin, end) in where.items():
        x[begin:end] = p.detach().flatten()
    parts = [(0, 10), (10, 24)]
    others = None
    with torch.no_grad():
        for step in range(6):
            for group in optimizer.param_groups:
                group["lr"] *= 0.9
            settings = OptimizerSettings.from_tensor(settings_of(optimizer, where.get).to_tensor())
            g = torch.randn(24)
            if step in (0, 3):
                states = [other.state() for other in others] if others else [{}, {}]
                others = [FlatOptimizer(settings, x[begin:end], begin) for begin, end in parts]
                for other, state in zip(others, states, strict=True):
                    other.load(state)
            for other, (begin, end) in zip(others, parts, strict=True):
                other.step(g[begin:end], settings)
            for p, (begin, end) in where.items():
                p.grad = g[begin:end].view(p.shape).clone()
            optimizer.step()
            for p, (begin, end) in where.items():
                assert torch.equal(x[begin:end], p.flatten())


def test_a_servers_optimizer_gets_what_it_can_use():
    """A loop may have rates of NumPy, graphs on its GPU, and entries of its own in groups."""
    optimizer = torch.optim.Adam([{"params": [torch.nn.Parameter(torch.zeros(3))], "depth": object()}], capturable=True)
    optimizer.param_groups[0]["lr"] = np.float32(0.1)
    settings = OptimizerSettings.from_tensor(settings_of(optimizer, lambda _: (0, 3)).to_tensor())
    settings.check(3)
    x = torch.zeros(3)
    with torch.no_grad():
        FlatOptimizer(settings, x, 0).step(torch.ones(3), settings)
    torch.testing.assert_close(x, torch.full((3,), -0.1))


def test_an_optimizer_of_the_users_own_is_refused_in_a_sentence():
    class Mine(torch.optim.SGD):
        pass

    with pytest.raises(pl.UsageError, match="Mine"):
        settings_of(Mine([torch.nn.Parameter(torch.zeros(3))], lr=1.0), lambda _: (0, 3))
