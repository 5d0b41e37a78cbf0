"""Downpour and AdaptiveRevision as whole methods: the paper's loop written out, warm start, and what they equal."""

from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

import paceline as pl
from paceline.algorithms import downpour
from paceline.algorithms.server.adaptive_revision import AdaptiveRevision
from paceline.algorithms.server.admission import WarmStart
from paceline.algorithms.server.client import Answer
from paceline.optim.settings import settings_of
from paceline.records import accruals
from paceline.records.step_record import RECORD_DTYPE
from paceline.run.simulate_task import TaskSimulation
from paceline.simulator import Cluster, Normal
from paceline.simulator.faults import Faults

VARIED = Normal(average_s=0.001, deviation_s=0.0004)
ALPHA = 0.25  # halves and quarters: exact


def final(algorithm, workers=3, **config):
    """The run and its final parameters (P,)."""
    settings = {"algorithm": algorithm, "workers": workers, "epochs": 0.5, **config}
    simulation = TaskSimulation(pl.TrainConfig(**settings), Cluster(workers=workers))
    run = simulation.run()
    x = torch.empty(simulation.binding.num_elements)
    simulation.machine.shared.snapshot(x)
    return run, x


def timed(algorithm, workers=4, *, steps=100, faults=None, **cluster):
    config = pl.TrainConfig(algorithm=algorithm, steps=steps)
    cluster = Cluster(workers=workers, **{"compute_s": VARIED, **cluster})
    run = pl.simulate_task(config, cluster=cluster, timing_only=True, num_parameters=100_000, faults=faults)
    assert run.result["outcome"] == "stopped", run.result["outcome_reason"]
    return run


class OneClient:
    """Stands for `Client` and one server, whose x takes a step of SGD at each push."""

    def __init__(self, *_, **__):
        self.x, self.version, self.server, self.log = torch.ones(1), 0, torch.ones(1), []
        self.versions, self.under_way = (0,), None

    def join(self):
        self.log.append("join")

    def tell(self, settings, state):
        pass

    def before_own_step(self, rows):
        pass

    def push(self, gradient, num_samples, rows, *, fetch=True):
        self.log.append(("push", float(gradient), num_samples))
        self.server -= ALPHA * gradient
        self.pushed = getattr(self, "pushed", 0) + 1
        if fetch:
            self.fetch()
        return Answer(self.pushed, self.version)

    def start_push(self, gradient, num_samples, rows, *, versions, fetch=True):
        answer = self.push(gradient, num_samples, rows, fetch=False)
        self.under_way = answer, self.server.clone() if fetch else None

    def start_fetch(self):
        self.under_way = None, self.server.clone()

    def finish(self):
        (answer, x), self.under_way = self.under_way or (None, None), None
        if x is not None:
            self.x.copy_(x)
            self.log.append("fetch")
        return answer

    def fetch(self):
        self.log.append("fetch")
        self.x.copy_(self.server)

    def leave(self):
        self.log.append("leave")

    def follow(self, lookups):
        assert lookups is None


class QuadraticReplica:
    """f(x) = x^2 / 2: the gradient is x itself; the optimizer is SGD with rate ALPHA."""

    samples = 2
    missing = ()
    rows = lookups = None

    def take_rows(self):
        pass

    def __init__(self, num_steps):
        self.num_steps, self.records, self.waiting = num_steps, [], 0

    def steps(self):
        return iter(range(1, self.num_steps + 1))

    def gradient(self, at, version):
        self.g = at.clone()

    def apply(self, to):
        to.sub_(ALPHA * self.g)

    def optimizer_settings(self):
        return settings_of(torch.optim.SGD([torch.nn.Parameter(self.g)], lr=ALPHA), lambda _: (0, 1))

    def optimizer_state(self):
        return {}

    def accrued(self):
        self.waiting += 1

    def applied(self, version, gradient_version):
        self.records += [version] * (self.waiting + 1)
        self.waiting = 0

    def settled(self, version):
        self.records += [version] * self.waiting
        self.waiting = 0


def papers_loop(num_steps, n_fetch, n_push):
    """Algorithm 7.1 with one worker; pushes after every n_push steps, and at the end."""
    x, server, accrued, pushes, samples = 1.0, 1.0, 0.0, [], 0
    for step in range(num_steps):
        if step % n_fetch == 0:
            x = server
        gradient = x
        accrued, samples = accrued + gradient, samples + 2
        x -= ALPHA * gradient
        if (step + 1) % n_push == 0 or step == num_steps - 1:
            pushes.append(("push", accrued, samples))
            server -= ALPHA * accrued
            accrued, samples = 0.0, 0
    return server, pushes


@pytest.mark.parametrize(("fetch", "push"), [(1, 1), (3, 3), (2, 3), (3, 2), (5, 1), (1, 4), (7, 5)])
@pytest.mark.parametrize("num_steps", [1, 6, 11])
def test_is_the_papers_loop(fetch, push, num_steps):
    client, replica = OneClient(), QuadraticReplica(num_steps)
    ports = SimpleNamespace(num_servers=1, num_workers=1, moved=lambda _: None, fetched=None)
    with mock.patch.object(downpour, "Client", return_value=client):
        pl.Downpour(fetch=fetch, push=push).work(replica, ports)
    server, pushes = papers_loop(num_steps, fetch, push)
    assert [one for one in client.log if one[0] == "push"] == pushes
    assert float(client.server) == server
    assert client.log.count("fetch") in (num_steps // fetch, num_steps // fetch + 1)  # and with the last push
    assert (client.log[0], client.log[-1]) == ("join", "leave")
    assert len(replica.records) == num_steps, "every gradient is recorded with the update that it became a part of"
    assert replica.records == sorted(replica.records)


def papers_loop_that_overlaps(num_steps, n_fetch, n_push):
    """As Algorithm 7.1 has it: what is fetched takes the place of the parameters after the next gradient."""
    x, server, accrued, fetched, pushes, samples = 1.0, 1.0, 0.0, None, [], 0
    for step in range(1, num_steps + 1):
        gradient = x
        x, fetched = x if fetched is None else fetched, None
        accrued, samples = accrued + gradient, samples + 2
        x -= ALPHA * gradient
        if step % n_push == 0 or step == num_steps:
            pushes.append(("push", accrued, samples))
            server -= ALPHA * accrued
            accrued, samples = 0.0, 0
        if step % n_fetch == 0:
            fetched = server
    return server, pushes


@pytest.mark.parametrize(("fetch", "push"), [(1, 1), (3, 3), (2, 3), (3, 2), (5, 1), (1, 4), (7, 5)])
@pytest.mark.parametrize("num_steps", [1, 6, 11])
def test_is_the_papers_loop_that_overlaps(fetch, push, num_steps):
    client, replica = OneClient(), QuadraticReplica(num_steps)
    ports = SimpleNamespace(num_servers=1, num_workers=1, moved=lambda _: None, fetched=None)
    with mock.patch.object(downpour, "Client", return_value=client):
        pl.Downpour(fetch=fetch, push=push, overlap=True).work(replica, ports)
    server, pushes = papers_loop_that_overlaps(num_steps, fetch, push)
    assert [one for one in client.log if one[0] == "push"] == pushes
    assert float(client.server) == server
    assert client.under_way is None
    assert replica.records == [-(-step // push) for step in range(1, num_steps + 1)], "each has its update"


def test_messages_travel_while_a_worker_computes():
    """Of 20 ms to the server and back, 10 ms pass within the next gradient."""
    waits, overlaps = (
        timed(f"downpour(overlap={one})", workers=2, compute_s=0.01, latency_s=0.01) for one in ("false", "true")
    )
    assert overlaps.result["steps"] == waits.result["steps"] == 200
    assert waits.result["wall_s"] == pytest.approx(100 * 0.03, rel=0.1)
    assert overlaps.result["wall_s"] == pytest.approx(100 * 0.02, rel=0.1)
    for rows in overlaps.records.values():
        assert (np.diff(rows["applied_version"]) > 0).all()
        assert (rows["applied_version"] > rows["read_version"]).all()


def test_an_echo_would_be_another_gradients():
    with pytest.raises(pl.UsageError, match=r"take adaptive-revision\(revision_state=snapshot\), or leave out overlap"):
        pl.Downpour(overlap=True, apply=AdaptiveRevision())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("downpour(apply=user)", "parameter-server(mode=async)"),
        ("downpour(shards=2)", "parameter-server(mode=async, apply=adagrad, shards=2)"),
        ("adaptive-revision(shards=2)", "parameter-server(mode=async, apply=adaptive-revision, shards=2)"),
        ("adaptive-revision(alpha=0.05)", "parameter-server(mode=async, apply=adaptive-revision(alpha=0.05))"),
        ("adaptive-revision", "adaptive-revision(revision_state=snapshot)"),
    ],
)
def test_equals_bit_for_bit(one, other):
    runs = [final(spec, learning_rate=0.05) for spec in (one, other)]
    assert runs[0][0].result["steps"] == 90
    if "snapshot" in other:  # no echo: shorter messages, and so another order
        assert runs[1][0].result["bytes_per_step"] < 0.6 * runs[0][0].result["bytes_per_step"]
        torch.testing.assert_close(runs[0][1], runs[1][1], rtol=0.05, atol=0.05)
    else:
        assert torch.equal(runs[0][1], runs[1][1])


def test_records_lie_as_accruals_think():
    names = RECORD_DTYPE.names
    assert [names[accruals._GRADIENT_VERSION], names[accruals._APPLIED_VERSION]] == [
        "gradient_version",
        "applied_version",
    ]


def test_alpha_stands_for_the_learning_rate():
    _, x = final("adaptive-revision(alpha=0.05)", learning_rate=0.9)
    _, expected = final("adaptive-revision", learning_rate=0.05)
    assert torch.equal(x, expected)


def test_the_rate_of_a_training_that_names_none():
    from paceline.tasks import load_task

    task = load_task("digits-mlp")
    delayed = "parameter-server(apply=delayed(delay=constant(updates_late=3), rule=adagrad))"
    specs = ("downpour", delayed, "downpour(apply=user)")
    rates = [pl.TrainConfig(algorithm=spec).resolved(task).learning_rate for spec in specs]
    assert rates == [0.01, 0.01, task.learning_rate]
    assert pl.TrainConfig(algorithm="downpour", learning_rate=0.3).resolved(task).learning_rate == 0.3


@pytest.mark.parametrize("shards", [1, 2])
def test_rare_pushes_and_fetches_are_rare_messages(shards):
    often, seldom = (timed(f"downpour(fetch={n}, push={n}, shards={shards})") for n in (1, 5))
    vectors = seldom.result["bytes_per_step"] / often.result["bytes_per_step"]
    assert vectors == pytest.approx(20 / 100, rel=1e-3)
    assert (often.result["steps"], seldom.result["steps"]) == (400, 80)
    assert seldom.result["computed_gradients"] == sum(seldom.result["updates_per_worker"]) == 400
    without_x = timed(f"downpour(fetch=100, shards={shards})").result
    assert without_x["bytes_per_step"] == often.result["bytes_per_step"]
    assert without_x["wall_s"] < often.result["wall_s"], "no parameters come back"


@pytest.mark.parametrize(("shards", "push", "fetch"), [(1, 1, 1), (2, 1, 1), (2, 4, 3)])
def test_one_worker_trains_alone_before_the_others(shards, push, fetch):
    run = timed(f"downpour(warm_start_steps=40, push={push}, fetch={fetch}, shards={shards})")
    first = run.records[0]
    alone_until_s = first["gradient_ended_s"][39]
    for worker in (1, 2, 3):
        own = run.records[worker]
        assert len(own) == 100
        assert own["gradient_started_s"].min() >= alone_until_s
        assert own["read_version"].min() >= 40 / push
    assert (first["applied_version"][:40] == np.arange(40) // push + 1).all()
    assert run.result["staleness"]["max"] > 0


@pytest.mark.parametrize("shards", [1, 2])
def test_the_worker_that_trains_alone_dies(shards):
    """The next one goes on where it was; with all dead but one, that one."""
    faults = Faults().kill(worker=0, at_s=0.01).kill(worker=1, at_s=0.08)
    run = timed(f"downpour(warm_start_steps=60, shards={shards})", faults=faults, detection_s=0.005)
    assert run.result["workers_lost"] == [0, 1]
    assert len(run.records[2]) == len(run.records[3]) == 100
    first = [rows["gradient_started_s"][0] for rows in run.records.values()]
    assert first[0] < first[1] < first[2] < first[3]
    for worker in (0, 1, 2):
        alone = run.records[worker][run.records[worker]["applied_version"] <= 60]
        assert len(alone) > 0
        assert (alone["read_version"] == alone["applied_version"] - 1).all()
    assert run.records[3]["read_version"].min() >= 60


def test_the_worker_that_trains_alone_runs_out_of_data():
    run = timed("downpour(warm_start_steps=1000)", steps=20)
    assert [len(rows) for rows in run.records.values()] == [20] * 4
    starts, ends = ([rows[name][place] for rows in run.records.values()] for name, place in
                    (("gradient_started_s", 0), ("ended_s", -1)))  # fmt: skip
    assert all(start >= end for start, end in zip(starts[1:], ends[:-1], strict=True)), "one after the other"


def test_a_successor_does_not_begin_the_warm_start_anew():
    admission = WarmStart(5, range(3))
    admission.over(5)
    assert [admission.may_read(worker) for worker in range(3)] == [True] * 3
    admission.over(4)
    assert [admission.may_read(worker) for worker in range(3)] == [True, False, False]
    admission.leave(0)
    assert [admission.may_read(worker) for worker in (1, 2)] == [True, False]
    admission.join(0)
    assert [admission.may_read(worker) for worker in range(3)] == [True, False, False]


@pytest.mark.parametrize("algorithm", ["adaptive-revision", "adaptive-revision(alpha=0.4, revision_state=snapshot)"])
def test_with_one_worker_adaptive_revision_is_adagrad_in_float64(algorithm):
    generator = torch.Generator().manual_seed(0)
    data = [torch.randn(4, 6, dtype=torch.float64, generator=generator) for _ in range(50)]

    def train(algorithm):
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1)).double()
        kind = torch.optim.SGD if algorithm else torch.optim.Adagrad
        optimizer = kind(
            model.parameters(), lr=0.4, **({} if algorithm else {"initial_accumulator_value": 1, "eps": 0})
        )
        with pl.attach(model, optimizer):
            for x in data:
                optimizer.zero_grad()
                (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
                optimizer.step()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    run = pl.simulate(lambda: train(algorithm), workers=1, algorithm=algorithm)
    torch.testing.assert_close(run.returned[0], train(None), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ("downpour(push=0)", "push of Downpour must be 1 or more"),
        ("downpour(fetch=0)", "fetch of Downpour must be 1 or more"),
        ("downpour(warm_start_steps=-1)", "0 or more"),
        ("downpour(shards=0)", "must be 1 or more"),
        ("adaptive-revision(alpha=0)", "above 0"),
        ("adaptive-revision(shards=0)", "must be 1 or more"),
        ("parameter-server(apply=adaptive-revision(alpha=-1))", "above 0"),
    ],
)
def test_refuses_in_a_sentence(spec, why):
    with pytest.raises(pl.UsageError, match=why):
        pl.parse(spec)
