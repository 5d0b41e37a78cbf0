"""Without a launcher a loop under `attach` is plain PyTorch: nothing is replaced, hooked or flattened, and nothing refused."""

import queue
import threading
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import paceline as pl
from contracts.table import ROWS
from paceline.worker import lone

SPECS = [row.spec for row in ROWS if row.algorithm == type(row.algorithm)()]


def made(kind=torch.optim.SGD, **settings):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Dropout(0.2), nn.Linear(5, 1))
    return model, kind(model.parameters(), **{"lr": 0.05} | settings)


def samples(number=40):
    x = torch.randn(number, 6, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.sum(1, keepdim=True))


def loss_of(model, batch):
    x, y = batch
    return (model(x) - y).square().mean()


def train(model, optimizer, batches):
    for batch in batches:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()


def state_of_all(model, optimizer):
    return [one.detach().clone() for one in (*model.parameters(), *model.buffers())]


def same_as_plain(loop, algorithm=None):
    """Runs `loop(attach)` with `attach` and without: it returns tensors, which must be the same bits."""

    def attach(model, optimizer):
        return pl.attach(model, optimizer, algorithm)

    ours, plain = loop(attach), loop(lambda *_: nullcontext(Plain()))
    assert len(ours) == len(plain) > 0
    assert all(torch.equal(one, other) for one, other in zip(ours, plain, strict=True))


class Plain:
    """What a loop of plain PyTorch does in place of a worker's methods."""

    def batches(self, loader):
        return loader

    def follow(self, scheduler):
        return scheduler


@pytest.mark.parametrize("algorithm", [None, *SPECS])
def test_a_shuffled_loop_is_plain_pytorch_bit_for_bit(algorithm):
    def loop(attach):
        model, optimizer = made(momentum=0.9)
        with attach(model, optimizer) as worker:
            batches = worker.batches(DataLoader(samples(), batch_size=8, shuffle=True))
            for _ in range(2):
                train(model, optimizer, batches)
        return state_of_all(model, optimizer)

    same_as_plain(loop, algorithm)


def test_nothing_is_replaced_hooked_or_flattened():
    model, optimizer = made(torch.optim.Adam)
    before = [(p, p.data_ptr(), p.untyped_storage().nbytes()) for p in model.parameters()]
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    loader = DataLoader(samples(), batch_size=8)
    with pl.attach(model, optimizer) as worker:
        for batch in worker.batches(loader):
            assert [(p, p.data_ptr(), p.untyped_storage().nbytes()) for p in model.parameters()] == before
            assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
            assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
            assert not any(p._post_accumulate_grad_hooks or p._backward_hooks for p in model.parameters())
            assert not any((optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks))
            train(model, optimizer, [batch])
            worker.report(loss_of(model, batch))
        assert worker.sum(2.5) == worker.mean(2.5) == 2.5
        assert worker.sum(torch.tensor([1, 2])).tolist() == [1, 2]
        assert worker.batches(loader).dataset is loader.dataset
        assert len(worker.batches(loader)) == len(loader)
    assert worker.summary() == {}


class TiedByView(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(6, 4, bias=False)
        self.decoder = [self.encode.weight.t()]

    def forward(self, x):
        return nn.functional.linear(self.encode(x), self.decoder[0])


def lbfgs(attach):
    model = nn.Linear(6, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), line_search_fn="strong_wolfe")
    with attach(model, optimizer) as worker:
        for batch in worker.batches(DataLoader(samples(), batch_size=20)):

            def closure(batch=batch):
                optimizer.zero_grad()
                loss = loss_of(model, batch)
                loss.backward()
                return loss

            optimizer.step(closure)
    return state_of_all(model, optimizer)


def moved_and_moved_back(attach):
    """As sharpness-aware methods do: the second gradient is of other weights."""
    model, optimizer = made()
    with attach(model, optimizer) as worker:
        for batch in worker.batches(DataLoader(samples(), batch_size=8)):
            loss_of(model, batch).backward()
            moves = [0.05 * p.grad for p in model.parameters()]
            for sign in (1, -1):
                for p, move in zip(model.parameters(), moves, strict=True):
                    p.data.add_(move, alpha=sign)
                if sign == 1:
                    optimizer.zero_grad()
                    loss_of(model, batch).backward()
            optimizer.step()
    return state_of_all(model, optimizer)


def aliases_from_before(attach):
    model = TiedByView()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    views = [p.detach().numpy() for p in model.parameters()]
    with attach(model, optimizer) as worker:
        for x, _ in worker.batches(DataLoader(samples(), batch_size=8)):
            optimizer.zero_grad()
            (model(x) - x).square().mean().backward()
            optimizer.step()
    return [*state_of_all(model, optimizer), *map(torch.from_numpy, views)]


def updated_by_hand(attach):
    model, optimizer = made()
    with attach(model, optimizer) as worker:
        for batch in worker.batches(DataLoader(samples(), batch_size=8)):
            loss_of(model, batch).backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.05 * p.grad
                    p.grad = None
    return state_of_all(model, optimizer)


def scripted(attach):
    model = torch.jit.script(nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with attach(model, optimizer) as worker:
        train(model, optimizer, worker.batches(DataLoader(samples(), batch_size=8)))
    return state_of_all(model, optimizer)


def without_elements(attach):
    model, _ = made()
    model.register_parameter("empty", nn.Parameter(torch.zeros(0, 3)))
    optimizer = torch.optim.Adam(model.parameters())
    with attach(model, optimizer) as worker:
        train(model, optimizer, worker.batches(DataLoader(samples(), batch_size=8)))
    return state_of_all(model, optimizer)


def fetched_in_a_thread(attach):
    model, optimizer = made()
    with attach(model, optimizer) as worker:
        fetched = queue.Queue(maxsize=2)

        def fetch():
            for batch in worker.batches(DataLoader(samples(), batch_size=8)):
                fetched.put(batch)
            fetched.put(None)

        thread = threading.Thread(target=fetch)
        thread.start()
        train(model, optimizer, iter(fetched.get, None))
        thread.join()
    return state_of_all(model, optimizer)


def unfrozen_inside(attach):
    model, optimizer = made()
    model[0].requires_grad_(False)
    with attach(model, optimizer) as worker:
        for _ in range(2):
            train(model, optimizer, worker.batches(DataLoader(samples(), batch_size=8)))
            model[0].requires_grad_(True)
    return state_of_all(model, optimizer)


def stepped_inside_backward(attach):
    model, _ = made()
    optimizers = {p: torch.optim.SGD([p], lr=0.05) for p in model.parameters()}

    def step(p):
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    with attach(model, list(optimizers.values())) as worker:
        for batch in worker.batches(DataLoader(samples(), batch_size=8)):
            loss_of(model, batch).backward()
    return state_of_all(model, None)


def one_cycle_followed(attach):
    model, optimizer = made()
    with attach(model, optimizer) as worker:
        train(model, optimizer, worker.batches(DataLoader(samples(), batch_size=8)))
        scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=10)  # of a second phase
        followed = worker.follow(scheduler)
        for _ in range(2):
            for batch in worker.batches(DataLoader(samples(), batch_size=8)):
                train(model, optimizer, [batch])
                followed.step()
    return [*state_of_all(model, optimizer), torch.tensor(scheduler.last_epoch)]


def adversaries(attach):
    """A scheduler of one of two optimizers that step in turn, unequally often."""
    (one, of_one), (other, of_other) = made(), made(torch.optim.Adam)
    schedulers = [lr_scheduler.StepLR(of, 2, gamma=0.5) for of in (of_one, of_other)]
    with attach((one, other), [of_one, of_other]) as worker:
        followed = [worker.follow(scheduler) for scheduler in schedulers]
        for number, batch in enumerate(worker.batches(DataLoader(samples(), batch_size=8))):
            for model, optimizer, scheduler in zip((one, other), (of_one, of_other), followed, strict=True):
                if model is one or number % 2:
                    train(model, optimizer, [batch])
                    scheduler.step()
    return [*state_of_all(one, of_one), *state_of_all(other, of_other)]


@pytest.mark.parametrize(
    "loop",
    [
        lbfgs,
        moved_and_moved_back,
        aliases_from_before,
        updated_by_hand,
        scripted,
        without_elements,
        fetched_in_a_thread,
        unfrozen_inside,
        stepped_inside_backward,
        one_cycle_followed,
        adversaries,
    ],
)
@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_loops_that_the_machinery_would_refuse_or_change(loop):
    def seeded(attach):
        torch.manual_seed(5)
        return loop(attach)

    same_as_plain(seeded)


class Stream(IterableDataset):
    def __iter__(self):
        yield from samples(20)


@pytest.mark.parametrize("asks_from", range(6))
@pytest.mark.parametrize("every", [1, 2], ids=["each batch", "accumulated"])
@pytest.mark.parametrize(
    "loader",
    [DataLoader(samples(20), batch_size=8), DataLoader(Stream(), batch_size=8), [samples(8)[:], samples(4)[:]] * 2],
    ids=["loader", "stream", "list"],
)
def test_progress_is_right_however_late_it_is_asked_for(loader, every, asks_from):
    """Against its definition: samples of the steps that are over, before and after each step."""
    model, optimizer = made()
    seen, expected = [], []
    given = in_steps = 0
    with pl.attach(model, optimizer) as worker:
        for _ in range(2):
            for number, batch in enumerate(worker.batches(loader), start=1):
                given += len(batch[0])
                expected.append(in_steps)
                seen.append(worker.progress if len(seen) >= asks_from else None)
                loss_of(model, batch).backward()
                if number % every == 0:
                    optimizer.step()
                    optimizer.zero_grad()
                    in_steps = given
                expected.append(in_steps)
                seen.append(worker.progress if len(seen) >= asks_from else None)
    assert seen[asks_from:] == expected[asks_from:]
    assert not optimizer._optimizer_step_post_hooks


def test_progress_is_right_where_the_optimizers_last_parameter_never_changes():
    model, _ = made()
    unused = nn.Linear(2, 2)
    optimizer = torch.optim.SGD([*model.parameters(), *unused.parameters()], lr=0.05)
    with pl.attach((model, unused), optimizer) as worker:
        for number, batch in enumerate(worker.batches(DataLoader(samples(), batch_size=8))):
            loss_of(model, batch).backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
        assert worker.progress == 32


def test_a_plain_loop_has_one_parameter_looked_at_per_batch(monkeypatch):
    """So the cost of `attach` does not grow with the model."""
    model, optimizer = made()
    looks = []
    monkeypatch.setattr(lone, "_VERSION", lambda p: looks.append(p) or p._version)
    with pl.attach(model, optimizer) as worker:
        at_begin = len(looks)
        train(model, optimizer, worker.batches(DataLoader(samples(), batch_size=8)))
    assert len(looks) - at_begin <= len(list(model.parameters())), "at most once, before the first step"


@pytest.mark.parametrize("asks_first", [True, False])
def test_progress_counts_the_samples_that_the_loop_tells(asks_first):
    model, optimizer = made()
    with pl.attach(model, optimizer) as worker:
        if asks_first:
            assert worker.progress == 0
        for batch in worker.batches(DataLoader(samples(), batch_size=8)):
            loss = loss_of(model, batch)
            worker.report(loss, samples=3)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert worker.progress == 15


def test_progress_of_a_loop_that_fetches_its_own_batches():
    model, optimizer = made()
    with pl.attach(model, optimizer) as worker:
        assert worker.progress == 0
        train(model, optimizer, DataLoader(samples(), batch_size=8))
        assert worker.progress == 40
    assert not any(module._forward_pre_hooks for module in model.modules())
    with pl.attach(model, optimizer) as worker:
        train(model, optimizer, DataLoader(samples(), batch_size=8))
        with pytest.raises(pl.UsageError, match=r"read it before the loop begins, or use worker\.batches"):
            _ = worker.progress


def test_a_rate_of_samples_is_followed():
    model, optimizer = made()
    with pl.attach(model, optimizer) as worker:
        scheduler = worker.follow(lr_scheduler.StepLR(optimizer, 1, gamma=0.5), samples_per_step=16)
        train(model, optimizer, worker.batches(DataLoader(samples(), batch_size=8)))
    assert scheduler.last_epoch == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"algorithm": "hogwold"}, "Unknown algorithm 'hogwold'"),
        ({"algorithm": 3}, "algorithm must be a spec"),
        ({"algorithm": "hogwild", "layout": "hybrid(groups=2)"}, "cannot average shards"),
        ({"algorithm": "all-reduce", "layout": "hybrid(groups=2, layers=0.5)"}, "0.5 is not an nn.Linear"),
        ({"layout": 5}, r"layout must be a spec, such as .* not 5"),
        ({"layout": pl.TensorParallel}, "layout must be a spec"),
        ({"layout": pl.AllReduce()}, "layout must be a spec"),
        ({"example_inputs": torch.zeros(1, 6)}, "give attach a layout"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(pl.UsageError, match=message):
        pl.attach(*made(), **arguments)


def test_of_a_wrapper_the_optimizer_inside_is_asked_for():
    class Lookahead:
        def __init__(self, inner):
            self.inner = inner

    model, optimizer = made()
    with pytest.raises(
        pl.UsageError, match=r"was given a Lookahead: if it is a wrapper.*give attach the optimizer inside"
    ):
        pl.attach(model, Lookahead(optimizer))


def test_a_lone_loops_batches_are_moved_too():
    model, optimizer = made()
    with pl.attach(model, optimizer) as worker:
        assert worker.device == torch.device("cpu")
        assert all(x.is_meta for x, _ in worker.batches(DataLoader(samples(), batch_size=8), device="meta"))


def test_simulated_workers_batches_are_moved_too():
    seen = []

    def train():
        model, optimizer = made()
        with pl.attach(model, optimizer) as worker:
            for x, _ in worker.batches(DataLoader(samples(), batch_size=8), device="meta"):
                seen.append(x.is_meta)
                optimizer.zero_grad()
                model(torch.zeros_like(x, device="cpu")).sum().backward()
                optimizer.step()

    pl.simulate(train, workers=2, algorithm="lockstep")
    assert seen
    assert all(seen)
