"""A user's own loop under `attach`, with one launched worker: plain PyTorch bit for bit, and everything as before on exit."""

import contextlib
import copy
import gc

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import leftovers
import paceline as pl
from contracts.table import HOLDERS, ROWS, rows
from loops.families import SERVED

EXACT_ROWS = [row for row in ROWS if not row.scales_fresh_updates and not row.own_rule]
ONE_OF_EACH = [row for row in EXACT_ROWS if row.algorithm == type(row.algorithm)()]

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
}
SCHEDULERS = {
    "none": None,
    "step": lambda o: (lr_scheduler.StepLR(o, step_size=1, gamma=0.5), "epoch"),
    "cosine": lambda o: (lr_scheduler.CosineAnnealingLR(o, T_max=3), "epoch"),
    "one cycle": lambda o: (lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=40, cycle_momentum=False), "step"),
    "warm up": lambda o: (lr_scheduler.LinearLR(o, start_factor=0.1, total_iters=20), "step"),
}


class Net(nn.Module):
    """With normalisation (buffers), dropout (random state), a frozen and an unused parameter."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(7, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Dropout(0.2), nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 3)
        )
        self.body[4].bias.requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(5))

    def forward(self, x):
        return self.body(x)


def pieces(optimizer="sgd"):
    torch.manual_seed(3)
    model = Net()
    data = torch.utils.data.TensorDataset(torch.randn(50, 7), torch.randint(0, 3, (50,)))
    batches = list(torch.utils.data.DataLoader(data, batch_size=8))
    return model, OPTIMIZERS[optimizer](model.parameters()), batches


def train(model, optimizer, batches, scheduler=None, epochs=3, seen=None):
    """One loop for both sides; `batches` is called for each epoch."""
    schedule, when = SCHEDULERS[scheduler or "none"](optimizer) if SCHEDULERS[scheduler or "none"] else (None, "")
    for _ in range(epochs):
        model.train()
        for x, y in batches():
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if when == "step":
                schedule.step()
            if seen is not None:
                seen.append(loss.item())
        if when == "epoch":
            schedule.step()
        model.eval()
        with torch.no_grad():
            if seen is not None:
                seen.append(model(torch.ones(1, 7)).sum().item())


def assert_same(one, other):
    assert one.keys() == other.keys()
    for key, value in one.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, other[key]), key
        elif isinstance(value, dict):
            assert_same(value, other[key])
        else:
            assert value == other[key], key


def plain(optimizer, scheduler=None):
    seen = []
    model, optimizer, loader = pieces(optimizer)
    train(model, optimizer, lambda: loader, scheduler, seen=seen)
    return model, optimizer, seen


def launched(loop, algorithm=None):
    """What the loop returns as the only worker of a run."""
    return pl.simulate(loop, workers=1, algorithm=algorithm).returned[0]


def attached(row, optimizer, scheduler=None):
    def loop():
        seen = []
        model, own, loader = pieces(optimizer)
        with pl.attach(model, own) as worker:
            train(model, own, lambda: worker.batches(loader), scheduler, seen=seen)
        return model, own, seen

    return launched(loop, row.algorithm)


def check(one, other):
    (model, optimizer, seen), (other_model, other_optimizer, other_seen) = one, other
    assert seen == other_seen
    assert_same(model.state_dict(), other_model.state_dict())
    assert_same(optimizer.state_dict()["state"], other_optimizer.state_dict()["state"])
    assert optimizer.state_dict()["param_groups"] == other_optimizer.state_dict()["param_groups"]
    for parameter, other_parameter in zip(model.parameters(), other_model.parameters(), strict=True):
        assert (parameter.grad is None) == (other_parameter.grad is None)
        assert parameter.grad is None or torch.equal(parameter.grad, other_parameter.grad)


def meetings(of_rows, names, common):
    """Every one of the names with each place that may hold the parameters, and the common one with the other rows."""
    met = [(row, name) for row in of_rows for name in names if name == common or row.spec in HOLDERS]
    return [pytest.param(row, name, id=f"{row.spec}-{name}") for row, name in met]


@pytest.mark.parametrize(("row", "optimizer"), meetings(ONE_OF_EACH, OPTIMIZERS, "momentum"))
def test_one_worker_equals_plain_pytorch(row, optimizer):
    check(plain(optimizer), attached(row, optimizer))


@pytest.mark.parametrize(
    ("row", "scheduler"), meetings(EXACT_ROWS, [name for name in SCHEDULERS if name != "none"], "one cycle")
)
def test_one_worker_equals_plain_pytorch_under_a_scheduler(row, scheduler):
    check(plain("momentum", scheduler), attached(row, "momentum", scheduler))


@rows(lambda row: not row.scales_fresh_updates and not row.own_rule)
def test_a_loop_that_fetches_its_batches_itself(row):
    kind = "momentum" if row.algorithm.weighting(1) else "adamw"

    def loop():
        model, optimizer, loader = pieces(kind)
        seen = []
        with pl.attach(model, optimizer):
            train(model, optimizer, lambda: loader, seen=seen)
        return model, optimizer, seen

    check(plain(kind), launched(loop, row.algorithm))


def accumulate(model, optimizer, batches):
    optimizer.zero_grad()
    for number, (x, y) in enumerate(batches, start=1):
        (nn.functional.cross_entropy(model(x), y) / 2).backward()
        if number % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("row", ONE_OF_EACH, ids=[row.spec for row in ONE_OF_EACH])
def test_accumulated_gradients(row):
    one, its_optimizer, loader = pieces("momentum")
    accumulate(one, its_optimizer, loader)

    def loop():
        other, optimizer, loader = pieces("momentum")
        with pl.attach(other, optimizer) as worker:
            accumulate(other, optimizer, worker.batches(loader))
        return other

    assert_same(one.state_dict(), launched(loop, row.algorithm).state_dict())


@pytest.mark.parametrize("row", ONE_OF_EACH, ids=[row.spec for row in ONE_OF_EACH])
def test_parameter_groups_with_rates_of_their_own(row):
    def grouped():
        model, _, loader = pieces()
        first, *others = (p for p in model.parameters() if p.requires_grad)
        groups = [{"params": [first], "lr": 0.01}, {"params": others, "lr": 0.2, "momentum": 0.5}]
        return model, torch.optim.SGD(groups, lr=0.1), loader

    one, optimizer, loader = grouped()
    train(one, optimizer, lambda: loader)

    def loop():
        other, optimizer, loader = grouped()
        with pl.attach(other, optimizer) as worker:
            train(other, optimizer, lambda: worker.batches(loader))
        return other

    assert_same(one.state_dict(), launched(loop, row.algorithm).state_dict())


@pytest.mark.parametrize("row", ONE_OF_EACH, ids=[row.spec for row in ONE_OF_EACH])
def test_everything_is_as_before_on_exit(row):
    before = leftovers.everything()

    def loop():
        model, optimizer, loader = pieces("adamw")
        parameters, keys = list(model.parameters()), list(model.state_dict())
        with pl.attach(model, optimizer) as worker:
            assert (worker.worker_id, worker.num_workers) == (0, 1)
            assert list(model.state_dict()) == keys
            train(model, optimizer, lambda: worker.batches(loader), epochs=1)
        assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))
        assert list(model.state_dict()) == keys
        return model, optimizer, loader

    model, optimizer, loader = launched(loop, row.algorithm)
    for tensor in (*model.parameters(), *model.buffers()):
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size(), "a view of something larger"
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    assert not model._forward_pre_hooks
    values = copy.deepcopy(model.state_dict())
    gc.collect()
    leftovers.assert_nothing_new(before)
    assert_same(values, model.state_dict())  # not in memory that went with the run
    train(model, optimizer, lambda: loader, epochs=1)  # and it can go on without us


@pytest.mark.parametrize("row", ONE_OF_EACH, ids=[row.spec for row in ONE_OF_EACH])
@pytest.mark.parametrize("where", ["before backward", "before step", "after step"])
def test_an_exception_in_the_loop_leaves_nothing_attached(row, where):
    model, optimizer, loader = pieces()

    def loop():
        with pl.attach(model, optimizer) as worker:
            for number, (x, y) in enumerate(worker.batches(loader)):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(x), y)
                if number == 2 and where == "before backward":
                    raise KeyError("mine")
                loss.backward()
                if number == 2 and where == "before step":
                    raise KeyError("mine")
                optimizer.step()
                if number == 2:
                    raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        launched(loop, row.algorithm)
    assert not optimizer._optimizer_step_pre_hooks
    train(model, optimizer, lambda: loader, epochs=1)


@pytest.mark.parametrize("by_keyword", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
def test_a_closure_is_evaluated_once_and_its_loss_returned(kind, by_keyword):
    trained, losses = [], []
    for attached in (False, True):
        model, _, loader = pieces()
        optimizer, evaluated = kind(model.parameters(), lr=0.1), []
        with pl.attach(model, optimizer) if attached else contextlib.nullcontext():
            for x, y in loader:

                def closure(x=x, y=y, model=model, optimizer=optimizer, evaluated=evaluated):
                    assert torch.is_grad_enabled()
                    optimizer.zero_grad()
                    loss = nn.functional.cross_entropy(model(x), y)
                    loss.backward()
                    evaluated.append(loss.item())
                    return loss

                found = optimizer.step(closure=closure) if by_keyword else optimizer.step(closure)
                assert found.item() == evaluated[-1]
        assert len(evaluated) == len(list(loader))
        trained.append(nn.utils.parameters_to_vector(model.parameters()))
        losses.append(evaluated)
    assert losses[0] == losses[1]
    assert torch.equal(*trained)
    assert not optimizer._optimizer_step_pre_hooks


@pytest.mark.parametrize("together", [False, True], ids=["one for each parameter", "one for all"])
def test_steps_inside_backward_are_refused(together):
    model, _, loader = pieces()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizers = [torch.optim.SGD(some, lr=0.1) for some in ([trained] if together else [[p] for p in trained])]
    for parameter in trained:
        parameter.register_post_accumulate_grad_hook(lambda _: optimizers[0].step())

    def loop():
        x, y = loader[0]
        with pl.attach(model, optimizers):
            nn.functional.cross_entropy(model(x), y).backward()

    with pytest.raises(pl.UsageError, match=r"call its step\(\) after backward\(\)"):
        launched(loop)


def test_a_reported_loss_that_is_not_finite_ends_the_run():
    model, optimizer, loader = pieces()
    with pl.attach(model, optimizer) as worker:
        next(iter(worker.batches(loader)))
        with pytest.raises(pl.PacelineError, match="nan at step 1"):
            worker.report(torch.tensor(float("nan")))


@pytest.mark.parametrize("after", [False, True], ids=["before step", "after step"])
@pytest.mark.parametrize("row", ONE_OF_EACH, ids=[row.spec for row in ONE_OF_EACH])
def test_losses_are_reported_before_the_step_or_after_it(row, after):
    losses = []

    def loop():
        model, optimizer, loader = pieces()
        with pl.attach(model, optimizer) as worker:
            for x, y in worker.batches(loader):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                if not after:
                    worker.report(loss)
                optimizer.step()
                if after:
                    worker.report(loss)
                losses.append(loss.item())

    run = pl.launch(loop, workers=1, algorithm=row.algorithm, backend="threads")
    assert run.records[0]["loss"].tolist() == losses
    assert run.records[0]["applied_version"].tolist() == list(range(1, 8))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.ReLU(), "no parameters"),
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double()), "one floating-point type"),
    ],
)
def test_models_that_cannot_be_shared(make, message):
    def loop():
        model = make()
        with pl.attach(model, torch.optim.SGD([*model.parameters(), nn.Parameter(torch.zeros(1))], lr=0.1)):
            pass

    with pytest.raises(pl.UsageError, match=message):
        launched(loop)


def test_sequential_alone_needs_no_launcher_and_unknown_algorithms_are_named():
    model, optimizer, _ = pieces()
    with pytest.raises(pl.UsageError, match=r"Unknown algorithm 'hogwold'.*hogwild"):
        pl.attach(model, optimizer, algorithm="hogwold")


@pytest.mark.parametrize("algorithm", SERVED)
def test_servers_refuse_an_optimizer_that_they_cannot_apply_before_the_first_batch(algorithm):
    class Normalised(torch.optim.SGD):
        pass

    had = []

    def loop():
        model = nn.Linear(3, 1)
        with pl.attach(model, Normalised(model.parameters(), lr=0.1)) as worker:
            had.extend(worker.batches([torch.ones(2, 3)] * 8))

    with pytest.raises(pl.UsageError, match=r"A server cannot apply Normalised.*or local-sgd"):
        pl.simulate(loop, workers=2, algorithm=algorithm)
    assert not had
