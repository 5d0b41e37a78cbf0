"""All state begins as worker 0's: trained and frozen parameters, buffers of any layout; and buffers are followed by name."""

import threading
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import paceline as pl
from loops import families
from loops.coder import own_id
from loops.unseeded import Net, values
from paceline.records import checkpoint_contents as checkpoint
from paceline.records import checkpoint_files

pytestmark = pytest.mark.filterwarnings(  # PyTorch's own, where sparse and quantised tensors are made and loaded
    "ignore:Sparse CSR tensor support",
    "ignore:torch.quantize_per_tensor",
    "ignore:TypedStorage is deprecated",
    "ignore:Validating sparse tensor invariants",
)


def check(found, expected):
    """The same; what is trained may be the mean of equal models, which is rounded."""
    for name, value in expected.items():
        assert found[name] == (pytest.approx(value, rel=1e-6) if name.startswith("head") else value), name


def simulated(loop, algorithm, **options):
    return pl.simulate(loop, workers=3, algorithm=algorithm, **options)


def in_threads(loop, algorithm, **options):
    return pl.launch(loop, workers=3, algorithm=algorithm, backend="threads", **options)


STARTS = pytest.mark.parametrize("start", [simulated, in_threads])


@STARTS
@pytest.mark.parametrize("algorithm", families.ALL)
def test_all_workers_begin_with_what_worker_0_has(algorithm, start):
    begun, all_have_looked = {}, threading.Barrier(3, timeout=60)

    def loop():
        model = Net(own_id())
        own = values(model)
        optimizer = torch.optim.SGD(model.head.parameters(), lr=0.01)
        with pl.attach(model, optimizer) as worker:
            begun[own_id()] = own, values(model)
            if start is in_threads:
                all_have_looked.wait()
            for x in worker.batches([torch.ones(2, 4)] * 6):
                optimizer.zero_grad()
                model(x).mean().backward()
                optimizer.step()

    assert start(loop, algorithm).result["outcome"] == "stopped"
    assert begun[1][0] != begun[0][0] != begun[2][0]
    for _, found in begun.values():
        check(found, begun[0][0])


def test_the_run_begins_with_worker_0s_model_though_it_comes_last():
    others, all_have_looked, begun = threading.Barrier(3, timeout=60), threading.Barrier(3, timeout=60), {}

    def loop():
        model = Net(own_id())
        own = values(model)
        if own_id() == 0:
            others.wait()
        optimizer = torch.optim.SGD(model.head.parameters(), lr=0.01)
        worker = pl.attach(model, optimizer)
        if own_id():
            others.wait()
        with worker:
            begun[own_id()] = own, values(model)
            all_have_looked.wait()
            optimizer.zero_grad()
            model(torch.ones(2, 4)).mean().backward()
            optimizer.step()

    in_threads(loop, "hogwild")
    assert begun[1][1] == begun[2][1] == begun[0][0]


@STARTS
def test_where_worker_0_does_not_attach_the_run_says_so(start):
    def loop():
        if own_id():
            model = Net(0)
            with pl.attach(model, torch.optim.SGD(model.head.parameters(), lr=0.01)):
                raise AssertionError("it began")

    with pytest.raises(pl.UsageError, match=r"Worker 0 ended without calling paceline\.attach") as raised:
        start(loop, "hogwild")
    raised.value.__traceback__ = None


@STARTS
@pytest.mark.parametrize("what", ["another width", "another name"])
def test_frozen_parts_of_other_shapes_are_refused(what, start):
    def loop():
        model = nn.ModuleDict({"head": nn.Linear(3, 2)})
        frozen = nn.Linear(3, 4 + (what == "another width" and own_id() == 1)).requires_grad_(False)
        model["other" if what == "another name" and own_id() == 1 else "base"] = frozen
        with pl.attach(model, torch.optim.SGD(model["head"].parameters(), lr=0.01)):
            raise AssertionError("it began")

    with pytest.raises(pl.UsageError, match="all workers must build the same model") as raised:
        start(loop, "hogwild")
    raised.value.__traceback__ = None


class Fourier(nn.Module):
    """Its frequencies are attributes, neither parameters nor buffers."""

    def __init__(self, seed):
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        self.frequencies, self.phases = torch.randn(3, 4, generator=draw), [torch.randn(4, generator=draw)]
        self.scale = torch.tensor(2.0)
        self.line = nn.Linear(4, 1)

    def forward(self, x):
        return self.line(torch.sin(self.scale * x @ self.frequencies + self.phases[0]))


@STARTS
@pytest.mark.parametrize("algorithm", ["lockstep", "all-reduce", "local-sgd", "d-psgd"])
@pytest.mark.parametrize("is_seeded", [True, False])
def test_tensors_that_no_module_has_registered_are_compared(is_seeded, algorithm, start):
    def loop():
        model = Fourier(0 if is_seeded else own_id())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with pl.attach(model, optimizer) as worker:
            for x in worker.batches([torch.ones(2, 3)] * 6):
                optimizer.zero_grad()
                model(x).mean().backward()
                optimizer.step()

    expected = pytest.warns(
        UserWarning, match=r"models differ in frequencies, phases\[0\], which is neither a parameter"
    )
    with nullcontext() if is_seeded else expected:
        start(loop, algorithm)


# Buffers that a loop replaces


class Averaging(nn.Module):
    """Keeps a running mean and a count, as modules of users do: in place, or by assignment."""

    def __init__(self, assigns):
        super().__init__()
        torch.manual_seed(0)
        self.line = nn.Linear(3, 1)
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("queue", torch.arange(6.0))
        self.register_buffer("count", torch.tensor(0))
        self.assigns = assigns

    def forward(self, x):
        if self.training and self.assigns:
            self.mean = self.mean + x.mean(0)
            self.queue = self.queue.flip(0).view(2, 3).t().flatten().view(6)
            self.count = self.count + 1
        elif self.training:
            self.mean.add_(x.mean(0))
            self.queue.copy_(self.queue.flip(0).view(2, 3).t().flatten())
            self.count.add_(1)
        return self.line(x - self.mean)


def averaging_loop(assigns, ends):
    def loop():
        model = Averaging(assigns)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
        with pl.attach(model, optimizer, evaluate=lambda model: {"loss": model.mean.sum().item()}) as worker:
            for x in worker.batches([torch.full((2, 3), float(number)) for number in range(12)]):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
            inside = model.mean.clone()
        ends[own_id()] = inside, {name: one.tolist() for name, one in model.named_buffers()}

    return loop


@pytest.mark.parametrize("algorithm", families.ALL)
def test_a_buffer_that_is_replaced_is_what_it_is_in_place(algorithm, tmp_path):
    found = []
    for assigns in (False, True):
        ends = {}
        run = simulated(averaging_loop(assigns, ends), algorithm, out=tmp_path / str(assigns))
        assert all(buffers == ends[0][1] for _, buffers in ends.values())
        assert ends[0][1]["count"] > 0
        assert run.evaluations[-1]["test_loss"] == sum(ends[0][1]["mean"])
        found.append(([inside.tolist() for inside, _ in ends.values()], [one["test_loss"] for one in run.evaluations]))
    in_place, assigned = found
    if algorithm not in families.ASYNCHRONOUS + families.SERVED:  # where another may have written it since it was read
        assert assigned == in_place


@pytest.mark.parametrize("algorithm", ["lockstep", "all-reduce", "local-sgd", "hogwild", "parameter-server"])
def test_a_replaced_buffer_is_in_checkpoints_and_on_all_workers(algorithm, tmp_path):
    ends = {}
    run = in_threads(averaging_loop(True, ends), algorithm, out=tmp_path / "run")
    assert all(buffers == ends[0][1] for _, buffers in ends.values())
    assert run.evaluations[-1]["test_loss"] == sum(ends[0][1]["mean"])
    saved = checkpoint.load_parameters(checkpoint_files.newest(tmp_path / "run" / "checkpoint"))
    assert {name: one.tolist() for name, one in saved.buffers.items()} == {
        f"buffer {name}": value for name, value in ends[0][1].items()
    }


def test_a_buffer_that_grows_stays_the_workers_own():
    ends = {}

    def loop():
        model = nn.Linear(3, 1)
        model.register_buffer("seen", torch.zeros(1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
        with pl.attach(model, optimizer) as worker:
            for x in worker.batches([torch.ones(2, 3)] * 12):
                model.seen = torch.cat([model.seen, x[:1, 0]])
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
        ends[own_id()] = model.seen.tolist()

    in_threads(loop, "all-reduce")
    assert ends == dict.fromkeys(range(3), [0.0] + [1.0] * 4)


# Optimizer state


@STARTS
@pytest.mark.parametrize("algorithm", [*families.SHARED_LOCKSTEP, *families.OWN_LOCKSTEP])
@pytest.mark.parametrize("loads", ["on worker 0", "everywhere"])
def test_optimizer_state_that_differs_is_refused_in_lockstep(loads, algorithm, start):
    def loop():
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        if loads == "everywhere" or own_id() == 0:
            model(torch.ones(2, 3)).mean().backward()
            optimizer.step()
        with pl.attach(model, optimizer) as worker:
            for x in worker.batches([torch.ones(2, 3)] * 6):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()

    if loads == "everywhere":
        assert start(loop, algorithm).result["outcome"] == "stopped"
        return
    with pytest.raises(pl.UsageError, match="optimizer of workers 1 and 2 begins with a different state") as raised:
        start(loop, algorithm)
    raised.value.__traceback__ = None


@STARTS
def test_objects_in_an_optimizer_s_state_are_compared_by_their_class(start):
    """GaLore's optimizers keep a projector of each parameter there."""

    class Projector:
        pass

    def loop():
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        optimizer.state[model.weight]["projector"] = Projector()
        with pl.attach(model, optimizer) as worker:
            for x in worker.batches([torch.ones(2, 3)] * 6):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()

    assert start(loop, "all-reduce").result["outcome"] == "stopped"
