"""Factors that differ from gradient to gradient weight the gradient, in momentum too; rates are the optimizer's own."""

import math
from types import SimpleNamespace

import pytest
import torch

import paceline as pl
from algorithms.server.test_shard import push, serve
from chosen import each_value
from paceline.algorithms.server.admission import Admission
from paceline.algorithms.server.apply import Momentum, StalenessScaled
from paceline.algorithms.server.delay import ConstantDelay
from paceline.algorithms.server.delayed import Delayed
from paceline.algorithms.server.user import UserOptimizer
from paceline.loop.task_replica import TaskReplica
from paceline.optim.flat import FlatBinding
from paceline.optim.settings import ELEMENTWISE, settings_of
from paceline.ports.ports import Message, Received
from paceline.simulator import Cluster
from paceline.simulator.replica import SimulatedReplica

OPTIM = torch.optim
LINEAR = [
    (OPTIM.SGD, {}),
    (OPTIM.SGD, {"momentum": 0.9}),
    (OPTIM.SGD, {"momentum": 0.9, "nesterov": True}),
    (OPTIM.SGD, {"momentum": 0.9, "dampening": 0.3}),
    (OPTIM.SGD, {"momentum": 0.9, "maximize": True}),
    (OPTIM.SGD, {"weight_decay": 0.1}),
    (OPTIM.SGD, {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True}),
    (OPTIM.ASGD, {"lambd": 0.01}),
]
ADAPTIVE = sorted(ELEMENTWISE - {OPTIM.SGD, OPTIM.ASGD}, key=lambda one: one.__name__)
WEIGHTS = (0.5, 1.75, 1.0)


class ByWorker(Admission):
    def weight(self, worker_id):
        return WEIGHTS[worker_id]


class Own(torch.optim.SGD):
    """A class of the user's own."""


def gradient_of(worker, step, size=3):
    draws = torch.Generator().manual_seed(100 * worker + step)
    return torch.randn(size, generator=draws, dtype=torch.float64)


def stepped(optimizer, arguments, gradients, rates, x=None):
    """Torch's own optimizer on these gradients, one step for each."""
    parameter = torch.nn.Parameter(torch.zeros(len(gradients[0]), dtype=torch.float64) if x is None else x.clone())
    own = optimizer([parameter], lr=1.0, **arguments)
    for gradient, rate in zip(gradients, rates, strict=True):
        own.param_groups[0]["lr"] = rate
        parameter.grad = gradient.clone()
        own.step()
    return parameter.detach()


# At a server

ORDER = [0, 1, 1, 2, 0, 2, 1, 0, 2, 2, 1, 0]  # of the workers whose gradients come


def served(optimizer, arguments, *, admission=None, rule=None, rates=(0.1, 0.1, 0.1)):
    """A shard's parameters (3,) after gradients in this order; each worker's optimizer has its own rate."""

    def arrivals():
        for worker, rate in enumerate(rates):
            own = optimizer([torch.nn.Parameter(torch.zeros(3))], lr=rate, **arguments)
            yield Received(worker, 0, Message("settings", x=settings_of(own, lambda _: (0, 3)).to_tensor()))
        for number, worker in enumerate(ORDER):
            message = push(worker, number + 1, 0.0, number).message
            yield Received(worker, 0, message._replace(x=gradient_of(worker, number)))

    x = torch.ones(3, dtype=torch.float64)
    return serve(arrivals(), workers=3, admission=admission, rule=rule or UserOptimizer(), x=x)[0].x


GRADIENTS = [gradient_of(worker, number) for number, worker in enumerate(ORDER)]
WEIGHTED = [gradient * WEIGHTS[worker] for gradient, worker in zip(GRADIENTS, ORDER, strict=True)]
ONES = torch.ones(3, dtype=torch.float64)


@pytest.mark.parametrize(("optimizer", "arguments"), LINEAR, ids=str)
def test_a_servers_optimizer_gets_gradients_that_are_multiplied(optimizer, arguments):
    found = served(optimizer, arguments, admission=ByWorker())
    expected = stepped(optimizer, arguments, WEIGHTED, [0.1] * 12, ONES)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)
    rates = [0.1 * WEIGHTS[worker] for worker in ORDER]
    on_the_rate = stepped(optimizer, arguments, GRADIENTS, rates, ONES)
    if arguments:
        assert not torch.allclose(found, on_the_rate, rtol=0, atol=1e-4)


@pytest.mark.parametrize("rule", [Momentum(beta=0.7), Momentum(beta=0.7, nesterov=True)], ids=str)
def test_a_servers_own_momentum_does_too(rule):
    found = served(OPTIM.SGD, {}, admission=ByWorker(), rule=rule)
    expected = stepped(OPTIM.SGD, {"momentum": 0.7, "nesterov": rule.nesterov}, WEIGHTED, [0.1] * 12, ONES)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)


def test_a_gradient_that_waits_keeps_its_own_workers_factor():
    found = served(
        OPTIM.SGD, {}, admission=ByWorker(), rule=Delayed(delay=ConstantDelay(updates_late=2), rule=Momentum())
    )
    expected = stepped(OPTIM.SGD, {"momentum": 0.9}, WEIGHTED[:-2], [0.1] * 10, ONES)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize(("optimizer", "arguments"), [*LINEAR, (OPTIM.AdamW, {}), (OPTIM.Adagrad, {})], ids=str)
def test_the_rate_that_a_worker_has_told_is_the_optimizers_of_that_step(optimizer, arguments):
    """As of any schedule: torch's step multiplies its momentum by the rate of now."""
    rates = (0.1, 0.02, 0.05)
    found = served(optimizer, arguments, rates=rates)
    expected = stepped(optimizer, arguments, GRADIENTS, [rates[worker] for worker in ORDER], ONES)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)


def simulated(algorithm, optimizer, arguments, steps, *, rate=0.1, size=3, gradient=gradient_of, **cluster):
    """Gradients that depend on worker and step alone; the final parameters and the run."""
    final = {}

    def loop():
        weights = torch.nn.ParameterList([torch.ones(size, dtype=torch.float64)])
        own = optimizer(weights.parameters(), lr=rate, **arguments)
        with pl.attach(weights, own) as worker:
            for step in range(steps[worker.worker_id]):
                own.zero_grad()
                (weights[0] @ gradient(worker.worker_id, step, size)).backward()
                own.step()
        final[worker.worker_id] = weights[0].detach().clone()

    cluster = Cluster(workers=len(steps), **{"compute_s": 1.0, **cluster})
    run = pl.simulate(loop, workers=len(steps), algorithm=algorithm, cluster=cluster)
    return final[0], run


@pytest.mark.parametrize(
    ("optimizer", "arguments"), [*LINEAR, (OPTIM.AdamW, {"weight_decay": 0.1}), (OPTIM.Adagrad, {})], ids=str
)
def test_a_linear_rate_is_a_learning_rate_and_follows_the_number_of_workers(optimizer, arguments):
    """Sums of gradients would be another rule: decay would not grow with them, and Adam would not notice."""
    steps = (9, 6, 4)
    found, _ = simulated(
        "parameter-server(rate=linear)".replace("rate", "mode=sync(rate") + ")", optimizer, arguments, steps
    )
    members = [[worker for worker in range(3) if step < steps[worker]] for step in range(9)]
    means = [torch.stack([gradient_of(worker, step) for worker in own]).mean(0) for step, own in enumerate(members)]
    expected = stepped(optimizer, arguments, means, [0.1 * len(own) for own in members], ONES)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)


def own_element(worker, step, size):
    return -torch.nn.functional.one_hot(torch.tensor(worker), size).double()


@pytest.mark.parametrize(
    ("arguments", "apply"),
    each_value(
        [{"momentum": 0.9, "nesterov": True}, {}, {"momentum": 0.9}],
        ["user", "momentum", "delayed(delay=constant(updates_late=1), rule=momentum)"],
    ),
    ids=str,
)
@pytest.mark.filterwarnings("ignore:The servers apply gradients by")
def test_rescaled_workers_move_the_parameters_equally_far(arguments, apply):
    """Speeds 5 : 2 : 1; each worker's gradient is an element of its own, so that its movement is seen."""
    moved = {}
    for rate in ("none", "rescaled"):
        algorithm = f"parameter-server(mode=async(rate={rate}), apply={apply})"
        settings = {"slowness": ((1, 2.5), (2, 5.0)), "gradient": own_element, "rate": 0.01}
        x, _ = simulated(algorithm, OPTIM.SGD, arguments, (500, 200, 100), **settings)
        moved[rate] = x - 1.0
    assert moved["none"][0] > 4.5 * moved["none"][2]
    torch.testing.assert_close(moved["rescaled"], moved["rescaled"].mean().expand(3), rtol=0.06, atol=0)


@pytest.mark.parametrize("rule", ["adam", "rmsprop", "adagrad", "async-adagrad", "adaptive-revision"])
@pytest.mark.parametrize("text", ["{}", "delayed(delay=constant(updates_late=1), rule={})"])
def test_a_servers_adaptive_rule_is_refused_where_gradients_are_weighted(rule, text):
    refused = rf"rate=rescaled scales every gradient .* of {rule} do not scale with its gradients: take apply=sgd or apply=mom"
    with pytest.raises(pl.UsageError, match=refused) as error:
        pl.parse(f"parameter-server(mode=async(rate=rescaled), apply={text.format(rule)})")
    assert "\n" not in str(error.value)
    pl.parse("parameter-server(mode=async(rate=rescaled), apply=momentum)")
    assert StalenessScaled().is_linear


# In shared memory

STEP_SIZES = {"locked": "inverse", "leashed": "exponential", "hogwild": "tail"}


@pytest.mark.parametrize("kind", [*ADAPTIVE, Own], ids=lambda one: one.__name__)
@pytest.mark.parametrize(
    ("algorithm", "option"),
    [
        *((f"{name}(step_size={size})", f"step_size={size}") for name, size in STEP_SIZES.items()),
        ("parameter-server(mode=async(rate=rescaled))", "rate=rescaled"),
    ],
)
def test_optimizers_that_are_not_linear_are_refused_before_the_first_step(algorithm, option, kind):
    started = []

    def loop():
        model = torch.nn.Linear(2, 1)
        optimizer = kind(model.parameters(), lr=0.1)
        with pl.attach(model, optimizer) as worker:
            started.append(worker)

    with pytest.raises(
        pl.UsageError, match=rf"^{option} scales .* of {kind.__name__} do not .* choose SGD.* leave out"
    ):
        pl.simulate(loop, workers=2, algorithm=algorithm)
    assert not started


@pytest.mark.parametrize("name", [*STEP_SIZES, "parameter-server"])
def test_the_built_in_loop_refuses_them_too_and_takes_them_without_the_option(name):
    size = "mode=async(rate=rescaled)" if name == "parameter-server" else f"step_size={STEP_SIZES[name]}"
    plain = "mode=async" if name == "parameter-server" else ""
    settings = {"workers": 2, "steps": 4, "backend": "threads", "optimizer": "adamw"}
    with pytest.raises(pl.UsageError, match=r"scales every gradient .* of AdamW do not"):
        pl.train(pl.TrainConfig(algorithm=f"{name}({size})", **settings))
    with pytest.raises(pl.UsageError, match=r"scales every gradient .* of AdamW do not"):
        pl.simulate_task(pl.TrainConfig(algorithm=f"{name}({size})", **settings), cluster=Cluster(workers=2))
    assert pl.train(pl.TrainConfig(algorithm=f"{name}({plain})", **settings)).result["outcome"] == "stopped"


def test_one_of_several_optimizers_is_enough_to_be_refused():
    def loop():
        model = torch.nn.Linear(2, 1)
        own = [OPTIM.SGD([model.weight], lr=0.1), OPTIM.AdamW([model.bias], lr=0.1)]
        with pl.attach(model, own):
            pass

    with pytest.raises(pl.UsageError, match="of AdamW do not scale"):
        pl.simulate(loop, workers=2, algorithm="hogwild(step_size=inverse)")


def test_a_lone_worker_has_no_server_that_would_weight_its_gradients():
    def loop():
        model = torch.nn.Linear(2, 1)
        optimizer = OPTIM.AdamW(model.parameters())
        with pl.attach(model, optimizer):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()

    pl.simulate(loop, workers=1, algorithm="parameter-server(mode=async(rate=rescaled))")


class BuiltIn:
    """A replica of our own loop, whose gradient is 1, 2, 3 at every step."""

    def __init__(self, kind, make_optimizer):
        model = torch.nn.Linear(3, 1, bias=False).double()
        binding = FlatBinding(list(model.parameters()))
        batches = SimpleNamespace(next=lambda: None)
        base = {"binding": binding, "recorder": None, "waits": [], "staleness": None, "stopped": lambda: False}
        core = SimpleNamespace(update=lambda *_: None, copy=lambda: None)
        simulated = {"core": core, "random_states": None, "num_blocks": 2} if kind is SimulatedReplica else {}
        self.replica = kind(model, lambda *_: None, make_optimizer, batches, **simulated, **base)
        begin, end = binding.ranges[0]
        self.x, self.part = binding.zeros(), slice(begin, end)

    @torch.no_grad()
    def step(self, weight, gradient=(1.0, 2.0, 3.0)):
        self.replica.g[self.part] = torch.as_tensor(gradient, dtype=torch.float64)
        self.replica.missing = ()
        self.replica.apply(to=self.x, weight=weight)


@pytest.mark.parametrize(("optimizer", "arguments"), LINEAR, ids=str)
@pytest.mark.parametrize("kind", [TaskReplica, SimulatedReplica])
def test_the_built_in_loop_weights_gradients(kind, optimizer, arguments):
    own = BuiltIn(kind, lambda parameters: optimizer(parameters, lr=0.1, **arguments))
    weights = (1.0, 0.5, 1.75, 0.0, 1.0)
    for weight in weights:
        own.step(weight)
    gradients = [torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64) * weight for weight in weights]
    expected = stepped(optimizer, arguments, gradients, [0.1] * 5)
    torch.testing.assert_close(own.x[own.part], expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize(("optimizer", "arguments"), LINEAR, ids=str)
def test_simulated_workers_round_as_real_ones(optimizer, arguments):
    real, simulated = (
        BuiltIn(kind, lambda parameters: optimizer(parameters, lr=0.1, **arguments))
        for kind in (TaskReplica, SimulatedReplica)
    )
    for staleness in range(12):
        for one in (real, simulated):
            one.x.zero_()
            one.step(1 / (staleness + 1), gradient_of(0, staleness))
        assert torch.equal(real.x, simulated.x)


def test_step_sizes_are_the_published_factors():
    ports = Counted(2)
    assert [pl.InverseStep().weight(tau, ports) for tau in (0, 1, 4)] == [1.0, 0.5, 0.2]
    at_half = pl.ExponentialStep(threshold=6).weight(3, ports)
    assert at_half == pytest.approx(1 / (1 + 3))
    assert pl.ExponentialStep().weight(3, ports) == pytest.approx(math.exp(-(2 / 3) * math.log(2.5) * 3))
    tail = pl.TailStep(amplitude=0.5)
    assert tail.weight(7, ports) == 1.0
    ports.seen = [0] * 5 + [1] * 10 + [2] * 5
    assert [tail.weight(tau, ports) for tau in (0, 1, 2, 3)] == [1.5, 1.25, 0.75, 0.5]


class Counted:
    """What `TailStep` asks of a run: how stale updates have been so far."""

    def __init__(self, num_workers):
        self.num_workers, self.staleness, self.seen = num_workers, self, []

    def total(self):
        return len(self.seen)

    def share_below(self, staleness):
        return sum(one < staleness for one in self.seen) / len(self.seen)


@pytest.mark.parametrize(("optimizer", "arguments"), LINEAR, ids=str)
@pytest.mark.parametrize(
    "step_size", [pl.InverseStep(), pl.ExponentialStep(threshold=2), pl.TailStep(amplitude=0.5)], ids=str
)
@pytest.mark.parametrize("kind", [pl.Locked, pl.Leashed, pl.Hogwild])
def test_in_shared_memory_momentum_keeps_each_gradients_factor(kind, step_size, optimizer, arguments):
    """Each worker's own optimizer, on the newest parameters, in the order in which the run has recorded its updates."""
    steps = (24, 14, 8)
    algorithm = kind(step_size=step_size)
    found, run = simulated(algorithm, optimizer, arguments, steps, slowness=((1, 1.7), (2, 3.1)))
    x = torch.nn.Parameter(ONES.clone())
    own = [optimizer([x], lr=0.1, **arguments) for _ in steps]
    updates = sorted(
        (int(record["applied_version"]), worker, step, int(record["gradient_version"] - record["read_version"]))
        for worker, records in run.records.items()
        for step, record in enumerate(records)
    )
    ports, weights = Counted(3), set()
    for _, worker, step, staleness in updates:
        weight = step_size.weight(staleness, ports)
        ports.seen.append(staleness)
        weights.add(weight)
        x.grad = gradient_of(worker, step) * weight
        own[worker].step()
    torch.testing.assert_close(found, x.detach(), rtol=0, atol=1e-13)
    assert len(weights) > 2


@pytest.mark.parametrize("optimizer", ["sgd(momentum=0.9, weight_decay=0.01)", "adamw"])
def test_what_compensates_for_merges_is_a_learning_rate(optimizer):
    """All steps of a run have the same, and merges drop decay and momentum's steps as well."""
    spec = "da-sgd(period=4, delay=2, local_weight=0.25, compensate={})"
    settings = {"task": "digits-mlp", "workers": 3, "steps": 30, "optimizer": optimizer}
    found = []
    for compensate, rate in (("true", 0.01), ("false", 0.01 / (1 - 0.75 * 2 / 4))):
        config = pl.TrainConfig(algorithm=spec.format(compensate), learning_rate=rate, **settings)
        found.append(pl.simulate_task(config, cluster=Cluster(workers=3)).result["test_loss"])
    assert found[0] == pytest.approx(found[1], rel=1e-6)
