"""A loop that clips its own gradients is told where the update is a mean of several; one that does not is told nothing."""

import threading
import warnings

import pytest
import torch
from torch import nn

import paceline as pl
from paceline.errors import ClippingWarning

BATCHES = [(torch.randn(6, 4, generator=torch.Generator().manual_seed(k)), torch.arange(6) % 3) for k in range(12)]
MEAN_OF_CLIPPED = [
    "lockstep",
    "parameter-server",
    "parameter-server(mode=sync(backups=1))",
    "local-sgd(warmup_steps=5)",
]
OTHERS = [
    "all-reduce", "local-sgd", "d-psgd", "ad-psgd", "hogwild", "locked", "leashed", "parameter-server(mode=async)",
    "downpour", "adaptive-revision",
]  # fmt: skip


def clip_norm(model):
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def clip_value(model):
    nn.utils.clip_grad_value_(model.parameters(), 0.01)


def clip_one_layer(model):
    nn.utils.clip_grad_norm_(model[2].parameters(), 0.1)


def normalise_by_hand(model):
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad / parameter.grad.norm()


def leave_alone(model):
    pass


def clear_a_layer(model):
    model[0].zero_grad(set_to_none=False)


def messages(algorithm, change=leave_alone, *, launch=pl.simulate, workers=3, scale=False, passes=1, **options):
    """What `attach` warns of, of all workers."""
    lock = threading.Lock()

    def train():
        with lock:
            torch.manual_seed(1)
            model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        model[0].bias.requires_grad_(not options.get("frozen", False))
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=scale)
        number = 0
        with pl.attach(model, optimizer) as worker:
            for x, y in worker.batches(BATCHES * passes):
                number += 1
                if (number - 1) % passes == 0:
                    optimizer.zero_grad(set_to_none=options.get("set_to_none", True))
                only_last = options.get("frozen", False) and number % 2
                hidden = model[1](model[0](x)).detach() if only_last else model[1](model[0](x))
                scaler.scale(nn.functional.cross_entropy(model[2](hidden), y)).backward()
                if number % passes:
                    continue
                if options.get("unscale", False):
                    scaler.unscale_(optimizer)
                change(model)
                scaler.step(optimizer)
                scaler.update()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        launch(train, workers=workers, algorithm=algorithm)
    return [str(one.message) for one in caught if issubclass(one.category, ClippingWarning)]


@pytest.mark.parametrize("algorithm", MEAN_OF_CLIPPED)
def test_a_loop_that_clips_its_own_gradient_is_told_once(algorithm):
    (said,) = messages(algorithm, clip_norm)
    assert "use all-reduce" in said
    assert messages(algorithm) == []


@pytest.mark.parametrize("algorithm", OTHERS)
def test_nothing_is_said_where_clipping_acts_on_what_is_applied(algorithm):
    assert messages(algorithm, clip_norm) == []


def test_a_lone_worker_clips_what_is_applied():
    assert messages("lockstep", clip_norm, workers=1) == []


@pytest.mark.parametrize("change", [clip_norm, clip_value, clip_one_layer, normalise_by_hand])
@pytest.mark.parametrize(
    "scaled", [{}, {"scale": True, "unscale": True}, {"passes": 2}], ids=["", "scaled", "two passes"]
)
def test_all_ways_to_clip(change, scaled):
    assert len(messages("lockstep", change, **scaled)) == 1


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize(
    "harmless",
    [
        {},
        {"passes": 2},
        {"scale": True},
        {"scale": True, "unscale": True},
        {"scale": True, "passes": 3},
        {"frozen": True},
        {"change": clear_a_layer},
    ],
    ids=["plain", "two passes", "scaled", "unscaled", "three scaled passes", "a frozen layer", "a cleared layer"],
)
def test_no_false_alarm(harmless, set_to_none):
    assert messages("lockstep", set_to_none=set_to_none, **harmless) == []


@pytest.mark.parametrize("change", [clip_norm, leave_alone])
def test_real_workers(change):
    def launch(train, **named):
        pl.launch(train, backend="threads", **named)

    assert len(messages("lockstep", change, launch=launch)) == (change is clip_norm)


def test_the_warning_is_of_the_line_that_steps():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")

        def train():
            model = nn.Linear(2, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with pl.attach(model, optimizer) as worker:
                for x in worker.batches([torch.ones(1, 2)] * 4):
                    model(x).sum().backward()
                    clip_value(model)
                    optimizer.step()

        pl.simulate(train, workers=2, algorithm="lockstep")
    (one,) = [one for one in caught if issubclass(one.category, ClippingWarning)]
    assert one.filename == __file__


def test_a_loop_is_watched_in_its_first_steps_only():
    left = []

    def train():
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pl.attach(model, optimizer) as worker:
            for number, x in enumerate(worker.batches([torch.ones(1, 2)] * 200)):
                model(x).sum().backward()
                if number == 80:
                    clip_value(model)
                optimizer.step()
                if worker.worker_id == 0:
                    left.append(bool(model.weight._post_accumulate_grad_hooks))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pl.simulate(train, workers=2, algorithm="lockstep")
    assert left[62:65] == [True, False, False]
