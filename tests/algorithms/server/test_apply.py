"""Every apply rule against torch.optim, the papers' formulas, and snapshots."""

import dataclasses

import pytest
import torch

from paceline.algorithms.server.adagrad import Adagrad, AsyncAdagrad
from paceline.algorithms.server.adaptive import Adam, RMSProp
from paceline.algorithms.server.adaptive_revision import AdaptiveRevision
from paceline.algorithms.server.apply import SGD, Momentum, StalenessScaled
from paceline.algorithms.server.delay import ConstantDelay
from paceline.algorithms.server.delayed import Delayed
from paceline.algorithms.server.registries import apply_registry
from paceline.algorithms.server.update import UpdateInfo

OPTIM = torch.optim
LIKE_TORCH = [
    (SGD(), OPTIM.SGD, {}),
    (Momentum(), OPTIM.SGD, {"momentum": 0.9}),
    (Momentum(beta=0.5, nesterov=True), OPTIM.SGD, {"momentum": 0.5, "nesterov": True}),
    (RMSProp(), OPTIM.RMSprop, {}),
    (RMSProp(alpha=0.9, momentum=0.9, eps=1.0), OPTIM.RMSprop, {"alpha": 0.9, "momentum": 0.9, "eps": 1.0}),
    (Adagrad(), OPTIM.Adagrad, {}),
    (Adagrad(initial=0.1, eps=1e-3), OPTIM.Adagrad, {"initial_accumulator_value": 0.1, "eps": 1e-3}),
    (Adam(), OPTIM.Adam, {}),
    (Adam(beta1=0.5, beta2=0.9, eps=1e-3), OPTIM.Adam, {"betas": (0.5, 0.9), "eps": 1e-3}),
    (AsyncAdagrad(), OPTIM.Adagrad, {"initial_accumulator_value": 1.0, "eps": 0.0}),
    (AdaptiveRevision(), OPTIM.Adagrad, {"initial_accumulator_value": 1.0, "eps": 0.0}),
    (AdaptiveRevision(revision_state="snapshot"), OPTIM.Adagrad, {"initial_accumulator_value": 1.0, "eps": 0.0}),
]
EVERY_RULE = [
    *(rule for rule, _, _ in LIKE_TORCH),
    AsyncAdagrad(form="dual-averaging"),
    StalenessScaled(),
    Delayed(delay=ConstantDelay(updates_late=3), rule=Adam()),
    Delayed(delay=ConstantDelay(updates_late=3), rule=AdaptiveRevision()),
]


def info(version=0, read=None, worker=0, echo=None):
    read = version if read is None else read
    return UpdateInfo(
        worker_id=worker, sequence=version, step=version, version_read=read, version=version, num_samples=1, echo=echo
    )


def run(rule, gradients, x, rates, *, applier=None, first=0):
    """One worker without delay."""
    applier = applier or rule.start(x.numel(), x.dtype)
    for version, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), start=first):
        echo = applier.read(0, version)
        before = gradient.clone()
        applier.apply(x, gradient, info(version, echo=echo.clone() if echo is not None else None), rate)
        assert torch.equal(gradient, before), "the gradient belongs to the caller"
    return applier


def draws(seed, *shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("rule", "optimizer", "arguments"), LIKE_TORCH, ids=lambda one: getattr(one, "__name__", str(one))
)
def test_equals_torch_with_a_changing_rate(rule, optimizer, arguments):
    gradients = list(draws(1, 40, 7))
    rates = [0.1 * 0.95**step for step in range(40)]
    x = draws(2, 7)
    parameter = torch.nn.Parameter(x.clone())
    theirs = optimizer([parameter], lr=1.0, **arguments)
    for gradient, rate in zip(gradients, rates, strict=True):
        theirs.param_groups[0]["lr"] = rate
        parameter.grad = gradient.clone()
        theirs.step()
    run(rule, gradients, x, rates)
    torch.testing.assert_close(x, parameter.detach(), rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("rule", EVERY_RULE, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_snapshot_goes_on_bit_for_bit(rule, dtype):
    gradients, rates = list(draws(3, 20, 5, dtype=dtype)), [0.1] * 20
    x = draws(4, 5, dtype=dtype)
    applier = run(rule, gradients[:10], x, rates[:10])
    x_then, state = x.clone(), {name: tensor.clone() for name, tensor in applier.state().items()}
    run(rule, gradients[10:], x, rates[10:], applier=applier, first=10)
    resumed = rule.start(5, dtype)
    resumed.load(state)
    for tensor in state.values():
        tensor.zero_()  # what was loaded must be a copy
    run(rule, gradients[10:], x_then, rates[10:], applier=resumed, first=10)
    assert torch.equal(x, x_then)
    for name, tensor in applier.state().items():
        assert torch.equal(tensor, resumed.state()[name])


@pytest.mark.parametrize("rule", EVERY_RULE, ids=str)
def test_shards_make_the_same_update_as_the_whole(rule):
    gradients, rates = draws(5, 12, 11), [0.1] * 12
    whole, x = draws(6, 11), draws(6, 11)
    run(rule, list(gradients), whole, rates)
    for part in (slice(0, 4), slice(4, 11)):
        run(rule, list(gradients[:, part]), x[part], rates)
    torch.testing.assert_close(x, whole, rtol=1e-13, atol=1e-14)  # vector kernels and their tails round apart


def test_a_snapshot_of_another_rule_or_size_is_refused_and_changes_nothing():
    adam = Adam().start(3, torch.float64)
    with pytest.raises(ValueError, match=r"of the servers' state, the state lacks"):
        adam.load(Momentum().start(3, torch.float64).state())
    smaller = Adam().start(2, torch.float64)
    run(Adam(), list(draws(7, 2, 2)), draws(8, 2), [0.1] * 2, applier=smaller)
    with pytest.raises(ValueError, match=r"is a tensor \(2,\) of float64 in place of a tensor \(3,\)"):
        adam.load(smaller.state())
    assert int(adam.state()["updates"]) == 0
    delayed = Delayed(delay=ConstantDelay(updates_late=1))
    with pytest.raises(ValueError, match="the state lacks 'num_put'"):
        delayed.start(2, torch.float64).load(smaller.state())
    held = run(delayed, list(draws(9, 1, 2)), draws(8, 2), [0.1])
    with pytest.raises(ValueError, match=r"is a tensor \(2,\) of float64 in place of a tensor \(3,\)"):
        delayed.start(3, torch.float64).load(held.state())


def test_dual_averaging_puts_every_gradient_at_the_newest_rate():
    gradients = draws(10, 15, 4)
    rates = [0.3 / (1 + step) for step in range(15)]
    x = draws(11, 4)
    expected = x - rates[-1] * gradients.sum(0) / (1 + gradients.square().sum(0)).sqrt()
    run(AsyncAdagrad(form="dual-averaging"), list(gradients), x, rates)
    torch.testing.assert_close(x, expected, rtol=1e-12, atol=1e-12)


def test_the_rate_falls_with_staleness_and_a_fresh_gradient_takes_all_of_it():
    applier = StalenessScaled().start(1, torch.float64)
    for staleness, expected in ((0, 1.0), (1, 1.0), (2, 0.5), (5, 0.2)):
        x = torch.zeros(1, dtype=torch.float64)
        applier.apply(x, -torch.ones(1, dtype=torch.float64), info(10, read=10 - staleness), 1.0)
        assert float(x) == pytest.approx(expected)


@pytest.mark.parametrize("name", list(apply_registry))
def test_specs_there_and_back(name):
    rule = apply_registry[name]
    instance = rule(delay=ConstantDelay(updates_late=2), rule=Momentum(beta=0.5)) if rule is Delayed else rule()
    assert apply_registry.build(apply_registry.spec(instance)) == instance
    numbers = [item.name for item in dataclasses.fields(rule) if item.type == "float"]
    for number in numbers:
        with pytest.raises(ValueError, match=number):
            apply_registry.build(f"{name}({number}=-1)")


def test_specs_of_rules():
    assert apply_registry.build("momentum(beta=0.5)") == Momentum(beta=0.5)
    assert apply_registry.build("async-adagrad(form=dual-averaging)").form == "dual-averaging"
    text = "delayed(delay=constant(updates_late=20), rule=adagrad)"
    assert apply_registry.build(text) == Delayed(delay=ConstantDelay(updates_late=20), rule=Adagrad())
    assert apply_registry.spec(apply_registry.build(text)) == text
    for impossible in (
        "adagrad(eps=0)",
        "adaptive-revision(reads_kept=0)",
        "delayed(delay=constant(updates_late=2), rule=adaptive-revision(revision_state=snapshot))",
        "momentum(beta=1)",
    ):
        with pytest.raises(ValueError, match=r"must be|cannot both be|would drop"):
            apply_registry.build(impossible)
