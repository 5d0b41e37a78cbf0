"""What is trained is settled at attach: several workers refuse what comes later or is in no model; one is plain PyTorch."""

import pytest
import torch
from torch import nn

import paceline as pl
from loops import families
from loops.coder import batches, loss_of, made, own_id, vector
from loops.habits import plain_attach

LATER = "attach after unfreezing"
NOT_IN_MODEL = r"is not in the model, and each worker would train its own: .* attach\(\(model, loss\), optimizer\)"
MISSED = "No optimizer that attach was given has the parameter encoder.weight"
NOT_GIVEN = "steps a SGD that attach was not given"


class Scaled(nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, output, x):
        return ((output - x) * self.scale).square().mean() + self.scale.square().mean()


def steps(model, optimizer, own, loss=lambda output, x: (output - x).square().mean()):
    for x in own:
        optimizer.zero_grad()
        loss(model(x), x).backward()
        optimizer.step()


def unfrozen_later(attach):
    model, _ = made()
    model.encoder.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    with attach(model, optimizer):
        steps(model, optimizer, batches(3))
        model.encoder.requires_grad_(True)
        steps(model, optimizer, batches(3))
    return model


def group_added_later(attach):
    model, _ = made()
    model.encoder.requires_grad_(False)
    optimizer = torch.optim.SGD(model.decoder.parameters(), lr=0.1, momentum=0.5)
    with attach(model, optimizer):
        steps(model, optimizer, batches(3))
        model.encoder.requires_grad_(True)
        optimizer.add_param_group({"params": list(model.encoder.parameters()), "lr": 0.01})
        steps(model, optimizer, batches(3))
    return model


def layer_replaced(attach):
    model, optimizer = made()
    with attach(model, optimizer):
        steps(model, optimizer, batches(3))
        model.decoder = nn.Linear(3, 6)
        optimizer.add_param_group({"params": list(model.decoder.parameters())})
        steps(model, optimizer, batches(3))
    return model


def loss_module(attach):
    model, _ = made()
    loss = Scaled()
    optimizer = torch.optim.SGD([*model.parameters(), *loss.parameters()], lr=0.1)
    with attach(model, optimizer):
        steps(model, optimizer, batches(6), loss)
    return nn.ModuleList([model, loss])


def loss_module_added_later(attach):
    model, optimizer = made()
    loss = Scaled()
    with attach(model, optimizer):
        steps(model, optimizer, batches(3))
        optimizer.add_param_group({"params": list(loss.parameters())})
        steps(model, optimizer, batches(3), loss)
    return nn.ModuleList([model, loss])


def missed(attach):
    model, _ = made()
    optimizer = torch.optim.SGD(model.decoder.parameters(), lr=0.1)
    with attach(model, optimizer):
        steps(model, optimizer, batches(6))
    return model


def second_optimizer_not_given(attach):
    model, optimizer = made()
    with attach(model, optimizer):
        steps(model, optimizer, batches(3))
        steps(model, torch.optim.SGD(model.parameters(), lr=0.01), batches(3))
    return model


REFUSED = {
    unfrozen_later: LATER,
    group_added_later: LATER,
    layer_replaced: LATER,
    loss_module: NOT_IN_MODEL,
    loss_module_added_later: NOT_IN_MODEL,
    missed: MISSED,
    second_optimizer_not_given: NOT_GIVEN,
}


def meetings(algorithms, loops):
    """Every kind with every loop, and each of the others with these."""
    return [(one, loop) for one in algorithms for loop in REFUSED if one in families.KINDS or loop in loops]


@pytest.mark.parametrize(("algorithm", "loop"), meetings(families.ALL, [group_added_later, missed]))
def test_two_workers_refuse_it(algorithm, loop):
    with pytest.raises(pl.UsageError, match=REFUSED[loop]):
        pl.simulate(lambda: loop(pl.attach), workers=2, algorithm=algorithm)


@pytest.mark.parametrize("loop", [unfrozen_later, second_optimizer_not_given])
def test_two_launched_workers_refuse_it(loop):
    with pytest.raises(pl.UsageError, match=REFUSED[loop]):
        pl.launch(lambda: loop(pl.attach), workers=2, algorithm="hogwild", backend="threads")


@pytest.mark.parametrize(
    ("algorithm", "loop"),
    [(None, loop) for loop in REFUSED]
    + meetings([one for one in families.ALL if one not in families.OWN_RULE], [group_added_later]),
)
def test_alone_it_is_plain_pytorch_bit_for_bit(algorithm, loop):
    torch.manual_seed(3)
    plain = loop(plain_attach)
    torch.manual_seed(3)
    ours = loop(lambda model, optimizer: pl.attach(model, optimizer, algorithm))
    assert torch.equal(vector(ours), vector(plain))


@pytest.mark.parametrize("algorithm", [None, "lockstep", "leashed"])
def test_alone_an_overflow_leaves_out_what_came_later_too(algorithm):
    def loop(attach):
        model, _ = made()
        model.encoder.requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        with attach(model, optimizer):
            model.encoder.requires_grad_(True)
            for number, x in enumerate(batches(5)):
                optimizer.zero_grad()
                scaler.scale(loss_of(model, x) * (float("inf") if number == 2 else 1.0)).backward()
                scaler.step(optimizer)
                scaler.update()
        return model

    ours, plain = loop(lambda model, optimizer: pl.attach(model, optimizer, algorithm)), loop(plain_attach)
    assert torch.equal(vector(ours), vector(plain))


@pytest.mark.parametrize("algorithm", families.ALL)
def test_what_is_frozen_in_both_stays_so(algorithm):
    """An optimizer may have frozen parameters, and a model's may be frozen later."""

    def loop():
        model, _ = made()
        model.encoder.weight.requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pl.attach(model, optimizer):
            steps(model, optimizer, batches(3))
            model.encoder.bias.requires_grad_(False)
            steps(model, optimizer, batches(3))

    assert pl.simulate(loop, workers=2, algorithm=algorithm).result["outcome"] == "stopped"


@pytest.mark.parametrize("algorithm", ["lockstep", "hogwild", "parameter-server"])
def test_a_loss_in_the_tuple_is_trained_together(algorithm):
    found = {}

    def loop():
        model, _ = made()
        loss = Scaled()
        optimizer = torch.optim.SGD([*model.parameters(), *loss.parameters()], lr=0.1)
        with pl.attach((model, loss), optimizer):
            steps(model, optimizer, batches(6), loss)
        found[own_id()] = loss.scale.detach().clone()

    pl.simulate(loop, workers=2, algorithm=algorithm)
    assert torch.equal(found[0], found[1])
    assert (found[0] != 1.0).all()


class Averaged(torch.optim.Optimizer):
    """Made of another optimizer, as Lookahead is."""

    def __init__(self, inner):
        self.inner = inner
        super().__init__(inner.param_groups, {})

    def step(self, closure=None):
        self.inner.step()


@pytest.mark.parametrize("algorithm", ["hogwild", "leashed"])
def test_optimizers_in_a_list_may_have_frozen_parameters(algorithm):
    """An overflow leaves a step out, and hides the gradients of both from it."""

    def loop():
        model, _ = made()
        model.encoder.weight.requires_grad_(False)
        optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model.encoder, model.decoder)]
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        with pl.attach((model.encoder, model.decoder), optimizers):
            for number, x in enumerate(batches(6)):
                for one in optimizers:
                    one.zero_grad()
                    scaler.scale(loss_of(model, x) * (float("inf") if number == 2 else 1.0)).backward()
                    scaler.step(one)
                    scaler.update()

    assert pl.simulate(loop, workers=2, algorithm=algorithm).result["outcome"] == "stopped"


@pytest.mark.parametrize("algorithm", ["lockstep", "hogwild", "leashed"])
def test_an_optimizer_may_be_made_of_another(algorithm):
    def loop():
        model, inner = made()
        optimizer = Averaged(inner)
        with pl.attach(model, optimizer):
            steps(model, optimizer, batches(4))

    assert pl.simulate(loop, workers=2, algorithm=algorithm).result["outcome"] == "stopped"


@pytest.mark.parametrize("algorithm", ["all-reduce", "hogwild", "parameter-server", "ad-psgd"])
def test_a_model_that_attach_was_not_given_is_warned_of_once_for_each_optimizer(algorithm):
    def loop():
        (model, optimizer), (other, its_own) = made(), made()
        with pl.attach(model, optimizer):
            for x in batches(4):
                steps(model, optimizer, [x])
                steps(other, its_own, [x])

    with pytest.warns(
        UserWarning, match=r"SGD that attach was not given, on parameters of which each worker"
    ) as caught:
        assert pl.simulate(loop, workers=2, algorithm=algorithm).result["outcome"] == "stopped"
    assert len(caught) == 2


def test_a_lone_worker_trains_a_second_model_as_plain_pytorch_does():
    (model, optimizer), (other, its_own) = made(), made()
    with pl.attach(model, optimizer):
        steps(other, its_own, batches(4))
        steps(model, optimizer, batches(4))


def test_no_hook_stays_behind():
    from torch.optim import optimizer as of_torch

    with pytest.raises(pl.UsageError, match=NOT_GIVEN):
        pl.simulate(lambda: second_optimizer_not_given(pl.attach), workers=2, algorithm="hogwild")
    assert not of_torch._global_optimizer_pre_hooks


@pytest.mark.parametrize("algorithm", families.ALL)
def test_frozen_before_the_first_call(algorithm):
    def loop():
        model, optimizer = made()
        before = model.encoder.weight.detach().clone()
        with pl.attach(model, optimizer):
            model.encoder.weight.requires_grad_(False)
            steps(model, optimizer, batches(3))
        return torch.equal(model.encoder.weight, before)

    assert all(pl.simulate(loop, workers=2, algorithm=algorithm).returned.values())


@pytest.mark.parametrize("has_registered", [True, False])
def test_layers_that_the_model_has_not_registered_are_named(has_registered):
    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = {"first": nn.Linear(6, 6), "second": nn.Linear(6, 6)}
            self.last = nn.Linear(6, 6)

        def forward(self, x):
            return self.last(self.layers["second"](self.layers["first"](x)))

    def loop():
        model = Stack()
        own = [p for layer in model.layers.values() for p in layer.parameters()]
        optimizer = torch.optim.SGD([*own, *(model.last.parameters() if has_registered else ())], lr=0.1)
        with pl.attach(model, optimizer):
            steps(model, optimizer, batches(3))

    with pytest.raises(pl.UsageError, match=r"keeps layers in layers, .* nn\.ModuleDict"):
        pl.simulate(loop, workers=2, algorithm="all-reduce")
