"""Memory traffic that is charged in a simulation is what PyTorch's operations read and write, counted one by one."""

import re
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline as pl
from paceline.algorithms import registry
from paceline.algorithms.server.registries import apply_registry
from paceline.algorithms.server.update import UpdateInfo
from paceline.compression.bf16 import BFloat16
from paceline.compression.codec import NoCodec
from paceline.compression.top_k import TopK
from paceline.run.simulate_task import TaskSimulation
from paceline.simulator import Cluster, Normal
from paceline.simulator.hardware.core import Core
from paceline.simulator.machine import SimulatedMachine
from paceline.simulator.mailbox import SimulatedMailbox
from paceline.transport.collectives import DistributedCollectives
from simulator.traffic_count import TrafficCount

PACKAGE = Path(pl.__file__).parent  # not any folder of that name: a clone or an environment may lie in one
PAGE = Path(__file__).parents[2] / "docs" / "simulated_traffic.md"
VECTOR_BYTES = 4 * 400_000


_MADE_ONCE = {"aten::zeros", "aten::new_zeros", "aten::ones", "aten::full"}  # buffers and states


class _Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.full((VECTOR_BYTES // 4 - 16,), 0.5))  # 16 elements are padding

    def forward(self, x):
        return (self.w * x.mean()).square().mean()


def planted_task(samples):
    data = TensorDataset(torch.ones(samples, 1), torch.zeros(samples, 1))
    return pl.Task(
        name="planted", model=_Model, datasets=lambda _: (data, data), loss=lambda out, _: out, accuracy=None,
        batch_size=8, learning_rate=1e-3,
    )  # fmt: skip


class Ledger:
    """Of one simulation: vectors that programs moved, as counted operation by operation and as charged."""

    def __init__(self, monkeypatch):
        self.counted, self.charged = Counter(), Counter()
        self.scheduler = None
        ledger = self
        moved, send = SimulatedMachine._moved, SimulatedMailbox.send

        def charging_moved(machine, core):
            inner = moved(machine, core)
            length = 1.0 if core.worker_id < machine.cluster.workers else 1.0 / machine._num_servers

            def charge(vectors, of=None):
                if sys._getframe(1).f_code.co_filename.endswith("/simulator/network_collectives.py"):
                    return inner(vectors, of)  # what the real ones do is tested below
                ledger.charged[core.worker_id] += vectors * (
                    of.nbytes / VECTOR_BYTES if of is not None and of.nbytes else length
                )
                return inner(vectors, of)

            return charge

        def charging_send(mailbox, to, message):
            if to != mailbox._worker_id and message.x is not None:
                rate = Cluster().core_bytes_per_s
                ledger.charged[mailbox._worker_id] += mailbox._copy_s_per_byte * rate * message.x.nbytes / VECTOR_BYTES
            send(mailbox, to, message)

        monkeypatch.setattr(SimulatedMachine, "_moved", charging_moved)
        monkeypatch.setattr(SimulatedMailbox, "send", charging_send)

    def counts(self):
        """Whether the operation under way is an algorithm's own, or a mailbox's copy of what it sends."""
        frame = sys._getframe(1)
        while frame is not None:
            name = frame.f_code.co_filename
            if name.startswith(f"{PACKAGE}/"):
                by_rule = (
                    frame.f_code.co_name in ("_revise", "_step", "_descend", "apply") and "/algorithms/server/" in name
                )
                ours = (f"{PACKAGE}/algorithms/", f"{PACKAGE}/compression/", f"{PACKAGE}/optim/outer.py")
                mine = name.startswith(ours) or name.endswith("/simulator/mailbox.py")
                return mine and not by_rule and not name.endswith("copies.py")
            frame = frame.f_back
        return False


class ByWorker(TrafficCount):
    """Counts for the worker, or server, whose program is running."""

    def __init__(self, ledger):
        super().__init__(ledger.counts)
        self._ledger = ledger

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = self.num_bytes
        returned = super().__torch_dispatch__(func, types, args, kwargs)
        if func._schema.name in _MADE_ONCE:
            return returned
        self._ledger.counted[self._ledger.scheduler.current.worker_id] += (self.num_bytes - before) / VECTOR_BYTES
        return returned


def play(spec, workers, monkeypatch, *, steps=4, cluster=None, **config):
    """A ledger of a run with real gradients, and the run."""
    monkeypatch.setattr("paceline.run.simulate_task.load_task", lambda _: planted_task(8 * steps * workers))
    ledger = Ledger(monkeypatch)
    cluster = cluster or Cluster(workers=workers, compute_s=Normal(average_s=0.05, deviation_s=0.004))
    config = {"epochs": 1} | config
    simulation = TaskSimulation(pl.TrainConfig(algorithm=spec, workers=workers, batch_size=8, **config), cluster)
    ledger.scheduler = simulation.machine.scheduler
    simulation.evaluator = simulation.record._evaluator = None
    with ByWorker(ledger):
        run = simulation.run()
    assert run.result["outcome"] == "stopped", run.result["outcome_reason"]
    return ledger, run


SPECS = [
    ("sequential", 1),
    ("hogwild(reads=copy)", 3),
    ("locked", 3),
    ("leashed", 3),
    ("lockstep", 3),
    ("all-reduce", 3),
    ("all-reduce(sharded=true)", 3),
    ("local-sgd(period=2)", 3),
    ("da-sgd(period=2)", 3),
    ("da-sgd(period=2, merge=corrected)", 3),
    ("da-sgd(period=2, delay=0)", 2),
    ("diloco(period=2)", 3),
    ("diloco(period=3, delay=1, local_weight=0.5)", 3),
    ("d-psgd", 3),
    ("d-psgd(topology=complete)", 4),
    ("ad-psgd", 4),
    ("ad-psgd(topology=complete)", 3),
    ("parameter-server", 3),
    ("parameter-server(shards=2)", 5),
    ("parameter-server(mode=async)", 3),
    ("parameter-server(mode=async, codec=bf16)", 3),
    ("parameter-server(mode=async, codec=bf16(feedback=true))", 2),
    ("parameter-server(mode=sync(backups=1), average=0.9)", 3),
    ("parameter-server(mode=bounded(clock_bound=1), shards=3)", 4),
    ("downpour(fetch=2, push=3)", 3),
    ("adaptive-revision", 3),
    ("parameter-server(mode=async, apply=adaptive-revision(revision_state=snapshot))", 3),
]


# In the whole run, and why it is not charged.
ONCE = {
    "all-reduce": (2, "the first gradients are scaled, as the others' weights are not known yet"),
    "diloco(period=2)": (2, "the outer parameters begin as a copy"),
    "diloco(period=3, delay=1, local_weight=0.5)": (2, "the same"),
    "parameter-server(mode=sync(backups=1), average=0.9)": (2, "the average begins as a copy"),
}
SNAPSHOT = "parameter-server(mode=async, apply=adaptive-revision(revision_state=snapshot))"


@pytest.mark.parametrize(("spec", "workers"), SPECS, ids=[f"{spec}, {workers}" for spec, workers in SPECS])
def test_what_is_charged_is_what_is_read_and_written(spec, workers, monkeypatch):
    ledger, _ = play(spec, workers, monkeypatch)
    once, _ = ONCE.get(spec, (0, ""))
    for member in sorted((set(ledger.counted) | set(ledger.charged)) - {-1}):
        # Of readers of one version only the first has a snapshot made: all read the first version.
        shared = 2 * (workers - 1) if spec == SNAPSHOT and member == workers else 0
        own_once = once if ("server" in spec) == (member >= workers) else 0
        expected = ledger.counted[member] - own_once + shared
        assert ledger.charged[member] == pytest.approx(expected, rel=0.01, abs=0.05), member


def test_a_crowded_leashed_charges_every_attempt(monkeypatch):
    """Short gradients: many attempts are lost, and each moves the difference once and a sum every time."""
    cluster = Cluster(workers=4, compute_s=Normal(average_s=2e-3, deviation_s=1e-3))
    moved = Counter()
    move = Core.move

    def counting(core, vectors):
        moved[core.worker_id] += vectors
        move(core, vectors)

    monkeypatch.setattr(Core, "move", counting)
    ledger, run = play("leashed", 4, monkeypatch, steps=8, cluster=cluster)
    lost = sum(int(rows["failed_publishes"].sum()) for rows in run.records.values())
    first = sum(int((rows["failed_publishes"] > 0).sum()) for rows in run.records.values())
    assert lost > 10
    assert sum(ledger.charged.values()) == 3 * lost
    assert sum(moved.values()) == 3 * lost + 3 * first  # and the update taken out of the first attempt


def test_leashed_publishes_what_plain_sgd_writes_in_one_pass():
    """Three vectors at the first attempt; an optimizer that cannot do so in passing copies first, as real replicas do."""
    for momentum, vectors in ((None, 3), (0.9, 2 + 3)):
        config = pl.TrainConfig(algorithm="leashed", workers=2, steps=3, optimizer="sgd", momentum=momentum)
        cluster = Cluster(workers=2, compute_s=1.0, bus_bytes_per_s=1e12).slow(worker=1, factor=1.37)
        runs = [pl.simulate_task(config, cluster=cluster, timing_only=True, num_parameters=10_000_000)]
        for run in runs:
            apply_s = run.records[0]["apply_s"]
            assert apply_s == pytest.approx([vectors * 4e7 / 10e9] * 3)


RULES = [name for name in apply_registry.names() if name not in ("user", "delayed")]
VARIANTS = [
    "momentum(nesterov=true)",
    "rmsprop(momentum=0.9)",
    "async-adagrad(form=dual-averaging)",
    "adaptive-revision(revision_state=snapshot)",
]


@pytest.mark.parametrize("spec", [*RULES, *VARIANTS])
def test_rules_say_what_they_move(spec):
    rule = apply_registry.build(spec)
    x, gradient = torch.ones(4096), torch.ones(4096)
    applier = rule.start(len(x), x.dtype)
    for sequence in (1, 2):  # the first may make the state
        echo = applier.read(0, sequence)
        echo = None if echo is None else echo.clone()
        info = UpdateInfo(
            worker_id=0, sequence=sequence, step=0, version_read=sequence, version=sequence, num_samples=1, echo=echo
        )
        with TrafficCount() as count:
            applier.apply(x, gradient, info, 1e-3)
    assert rule.update_vectors == pytest.approx(count.num_bytes / x.nbytes, rel=1e-3)


@pytest.mark.parametrize(("rule", "vectors"), [("momentum", 8 + 2), ("adaptive-revision", 31 + 4), ("user", None)])
def test_a_gradient_that_waits_is_copied(rule, vectors):
    assert apply_registry.build(f"delayed(delay=constant(updates_late=3), rule={rule})").update_vectors == vectors


@pytest.mark.parametrize(
    ("codec", "not_seen", "looked_at"),
    [
        (NoCodec(), 0, 0),
        (BFloat16(), 0, 0.5),
        (BFloat16(feedback=True), 0, 0.5),
        (TopK(fraction=0.01), 3, 1),
        (TopK(fraction=0.2), 3, 1),
    ],
    ids=str,
)
def test_codecs_say_what_they_move(codec, not_seen, looked_at):
    """Where elements are taken by index, PyTorch's operations name whole vectors that they do not read.

    Looking for what is not finite is one pass that only reads, and is not charged.
    """
    gradient = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0))
    memory = codec.start(len(gradient), gradient.dtype)
    with TrafficCount() as encoding:
        encoded = codec.encode(gradient, memory)
    with TrafficCount() as decoding:
        codec.decode(encoded, len(gradient), gradient.dtype)
    assert codec.moves.encoding == pytest.approx(
        encoding.num_bytes / gradient.nbytes - not_seen - looked_at, rel=0.05, abs=1e-9
    )
    assert codec.moves.decoding == pytest.approx(
        decoding.num_bytes / gradient.nbytes - (2 if not_seen else 0), rel=0.05, abs=1e-9
    )


class _Group(DistributedCollectives):
    """Collectives of four workers, of which one is here: what the others send is made up."""

    def __init__(self):
        self._num_workers, self._worker_id = 4, 1

    def start_all_reduce(self, vector):
        if vector.dtype == torch.float64:
            vector.fill_(8.0)
        return type("Handle", (), {"wait": lambda _: None})()


def test_a_mean_over_a_network_is_weighed_and_divided(monkeypatch):
    vector = torch.ones(1 << 16)
    with TrafficCount() as count:
        _Group().all_reduce_mean(vector, 8.0)
    assert count.num_bytes / vector.nbytes == pytest.approx(4.0, rel=0.01)
    config = pl.TrainConfig(algorithm="lockstep", workers=4, steps=1)
    cluster = Cluster(workers=4, collective="ring", compute_s=1.0)
    run = pl.simulate_task(config, cluster=cluster, timing_only=True, num_parameters=25_000_000)
    operation_s = 2 * 3 * (50e-6 + (64 + 25e6) / 1.25e9)
    assert run.result["wall_s"] == pytest.approx(1.0 + operation_s + (4 + 3) * 0.01)


@pytest.mark.parametrize("workers", [2, 8, 32])
def test_a_server_that_adds_more_gradients_takes_longer(workers):
    """100 MB: 10 ms per vector. N - 1 sums, a division, the update; then an answer copied for each, the last one's last."""
    cluster = Cluster(workers=workers, compute_s=1.0, bandwidth_bytes_per_s=1e18, latency_s=0.0)
    config = pl.TrainConfig(algorithm="parameter-server", workers=workers, steps=3)
    run = pl.simulate_task(config, cluster=cluster, timing_only=True, num_parameters=25_000_000)
    server_s = 0.01 * (3 * (workers - 1) + 2 + 3)
    sent_s, answered_s, taken_s = 0.02, 0.02 * workers, 0.02
    ended_s = max(float(rows["ended_s"][0]) for rows in run.records.values())
    first_s = 0.02 * workers  # the parameters to begin with, and then each step begins as it got them
    assert ended_s == pytest.approx(first_s + taken_s + 1.0 + sent_s + server_s + answered_s + taken_s, rel=0.01)


@pytest.mark.parametrize("degree", [2, 7])
def test_mixing_takes_as_long_as_there_are_neighbours(degree):
    topology = "ring" if degree == 2 else "complete"
    cluster = Cluster(workers=8, compute_s=1.0, bandwidth_bytes_per_s=1e18, latency_s=0.0)
    config = pl.TrainConfig(algorithm=f"d-psgd(topology={topology})", workers=8, steps=2)
    run = pl.simulate_task(config, cluster=cluster, timing_only=True, num_parameters=25_000_000)
    step_s = 0.01 * 2 * degree + 1.0 + 0.01 * (2 + 3 * degree) + 0.03
    assert run.result["wall_s"] == pytest.approx(2 * step_s, rel=1e-6)


def test_gossip_holds_its_lock_while_it_averages():
    """A pair: a copy of 20 ms to compute on, and a program that wants it while the other moves vectors waits."""
    cluster = Cluster(workers=2, compute_s=0.05, bandwidth_bytes_per_s=1e18, latency_s=0.0)
    config = pl.TrainConfig(algorithm="ad-psgd", workers=2, steps=10)
    run = pl.simulate_task(config, cluster=cluster, timing_only=True, num_parameters=25_000_000)
    alone_s = 10 * (0.02 + 0.05 + 0.03)
    assert run.result["wall_s"] > alone_s + 0.05
    assert sum(float(rows["wait_s"].sum()) for rows in run.records.values()) > 0.05


def test_the_page_has_every_algorithm_and_the_figures_of_its_code():
    text = PAGE.read_text(encoding="utf-8")
    for name in registry.names():
        assert f"`{name}" in text, name
    rules = dict(re.findall(r"^\| `([a-z-]+)` \| ([0-9.]+) \|", text, flags=re.MULTILINE))
    assert {name: float(rules[name]) for name in RULES} == {
        name: apply_registry.build(name).update_vectors for name in RULES
    }
