"""What a loop has loaded into its optimizer counts: momentum goes on where it was, wherever the optimizer's steps are made."""

import copy
import io
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import paceline as pl
from loops import families
from loops.coder import batches, loss_of, made, own_id, vector
from paceline.algorithms.server.incoming import read_state, state_to_bytes
from paceline.algorithms.server.user import UserApplier
from paceline.optim.flat_optimizer import FlatOptimizer
from paceline.optim.settings import settings_of, state_of
from paceline.ports.checks import MalformedMessageError
from paceline.ports.ports import Message, Received

WHERE = [
    *families.SHARED_LOCKSTEP,
    *families.OWN_LOCKSTEP,
    "parameter-server",
    "parameter-server(shards=3)",
    "parameter-server(shards=2, durability=replica)",
]
OPTIMIZERS = {
    "adamw": lambda model: torch.optim.AdamW(
        [
            {"params": model.encoder.parameters(), "lr": 0.05},
            {"params": model.decoder.parameters(), "weight_decay": 0.1},
        ],
        lr=0.02,
    ),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "amsgrad": lambda model: torch.optim.Adam(model.parameters(), lr=0.05, amsgrad=True),
}
XS = batches(12, worker=9)


def steps(model, optimizer, xs):
    for x in xs:
        optimizer.zero_grad()
        loss_of(model, x).backward()
        optimizer.step()


def saved_and_expected(optimizer_of):
    """A checkpoint after six steps, and where six more lead."""
    model, _ = made()
    optimizer = optimizer_of(model)
    steps(model, optimizer, XS[:6])
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    steps(model, optimizer, XS[6:])
    return saved, vector(model)


def resumed(optimizer_of, saved):
    """A loop that goes on from the checkpoint; all its workers draw the same, so that their mean is what one does."""

    def loop():
        model, _ = made()
        optimizer = optimizer_of(model)
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(copy.deepcopy(saved[1]))
        with pl.attach(model, optimizer, same_random=True):
            steps(model, optimizer, XS[6:])
        return vector(model)

    return loop


@pytest.mark.parametrize("optimizer_of", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("algorithm", WHERE)
def test_two_workers_go_on_as_one_does(algorithm, optimizer_of):
    saved, expected = saved_and_expected(optimizer_of)
    run = pl.simulate(resumed(optimizer_of, saved), workers=2, algorithm=algorithm)
    torch.testing.assert_close(run.returned[0], expected, rtol=1e-5, atol=1e-6)


class Odd(nn.Module):
    """A kernel whose elements have another order in memory, and a parameter without dimensions."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.kernel = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def train_on(self, xs, optimizer):
        for x in xs:
            optimizer.zero_grad()
            (self.scale * self.kernel(x.view(2, 2, 2, 3))).square().mean().backward()
            optimizer.step()


@pytest.mark.parametrize("optimizer_of", [OPTIMIZERS["momentum"], OPTIMIZERS["amsgrad"]], ids=["momentum", "amsgrad"])
@pytest.mark.parametrize("algorithm", WHERE)
def test_state_of_parameters_of_any_form_goes_on(algorithm, optimizer_of):
    model = Odd()
    optimizer = optimizer_of(model)
    model.train_on(XS[:6], optimizer)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    model.train_on(XS[6:], optimizer)

    def loop():
        own = Odd()
        its = optimizer_of(own)
        own.load_state_dict(saved[0])
        its.load_state_dict(copy.deepcopy(saved[1]))
        with pl.attach(own, its, same_random=True):
            own.train_on(XS[6:], its)
        return own.state_dict()

    run = pl.simulate(loop, workers=2, algorithm=algorithm)
    for name, expected in model.state_dict().items():
        torch.testing.assert_close(run.returned[0][name], expected, rtol=1e-5, atol=1e-6)


SERVED = ["parameter-server", "parameter-server(mode=async)", "downpour(apply=user)"]


@pytest.mark.parametrize("algorithm", [*SERVED, "all-reduce(sharded=true)"])
def test_a_checkpoint_that_lacks_the_optimizers_state_is_warned_of(algorithm):
    def loop():
        model, optimizer = made(momentum=0.9)
        with pl.attach(model, optimizer):
            steps(model, optimizer, batches(3))
            if own_id() == 0:
                saved = copy.deepcopy(optimizer.state_dict())
                assert len(saved["state"]) < 4
            steps(model, optimizer, batches(3))

    with pytest.warns(
        UserWarning, match=r"has only the state of this worker's own part|lacks its current values"
    ) as caught:
        pl.simulate(loop, workers=2, algorithm=algorithm)
    assert len(caught) == 1


@pytest.mark.parametrize("algorithm", SERVED)
def test_it_still_lacks_it_after_the_run_until_the_loop_loads_some(algorithm):
    def loop():
        model, optimizer = made(momentum=0.9)
        with pl.attach(model, optimizer):
            steps(model, optimizer, batches(3))
        if own_id() == 0:
            with pytest.warns(UserWarning, match="lacks its current values"):
                optimizer.state_dict()
            optimizer.load_state_dict(made()[1].state_dict())
            optimizer.state_dict()

    pl.simulate(loop, workers=2, algorithm=algorithm)


@pytest.mark.parametrize("algorithm", SERVED)
def test_loading_it_in_mid_run_is_refused(algorithm):
    def loop():
        model, optimizer = made(momentum=0.9)
        fresh = optimizer.state_dict()
        with pl.attach(model, optimizer):
            steps(model, optimizer, batches(2))
            optimizer.load_state_dict(fresh)

    with pytest.raises(pl.UsageError, match="load_state_dict before"):
        pl.simulate(loop, workers=2, algorithm=algorithm)


@pytest.mark.parametrize("algorithm", ["all-reduce", "local-sgd", "hogwild", "leashed", "ad-psgd", "downpour"])
def test_elsewhere_nothing_is_said(algorithm):
    def loop():
        model, optimizer = made(momentum=0.9)
        with pl.attach(model, optimizer):
            steps(model, optimizer, batches(3))
            optimizer.load_state_dict(optimizer.state_dict())

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*overrides the workers' optimizer")
        pl.simulate(loop, workers=2, algorithm=algorithm)


def test_on_threads_the_servers_get_it_too():
    saved, expected = saved_and_expected(OPTIMIZERS["adamw"])
    loop, ended = resumed(OPTIMIZERS["adamw"], saved), {}

    def kept():
        x = loop()
        ended[own_id()] = x

    pl.launch(kept, workers=2, algorithm="parameter-server(shards=2)", backend="threads")
    for x in ended.values():
        torch.testing.assert_close(x, expected, rtol=1e-5, atol=1e-6)


def test_parameters_without_state_begin_at_the_servers_as_they_do_alone():
    """A checkpoint from before the decoder was trained."""
    optimizer_of = OPTIMIZERS["adamw"]
    saved, _ = saved_and_expected(optimizer_of)
    for number in (2, 3):
        del saved[1]["state"][number]
    model, _ = made()
    optimizer = optimizer_of(model)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(copy.deepcopy(saved[1]))
    steps(model, optimizer, XS[6:])
    run = pl.simulate(resumed(optimizer_of, saved), workers=2, algorithm="parameter-server(shards=2)")
    torch.testing.assert_close(run.returned[0], vector(model), rtol=1e-5, atol=1e-6)


def test_a_worker_may_have_another_default_type_than_its_servers():
    where = {torch.nn.Parameter(torch.ones(n, dtype=torch.float64)): (n - 3, 2 * n - 3) for n in (3, 6)}
    optimizer = torch.optim.Adam(where)
    next(iter(where)).grad = torch.ones(3, dtype=torch.float64)
    torch.set_default_dtype(torch.float64)
    try:
        optimizer.step()
        state = state_of([optimizer], where.get, 9)
    finally:
        torch.set_default_dtype(torch.float32)
    server = FlatOptimizer(settings_of(optimizer, where.get), torch.ones(9, dtype=torch.float64), 0)
    server.load(state)
    assert server.state()["exp_avg"].tolist() == pytest.approx([0.1] * 3 + [0.0] * 6)


def test_downpour_with_the_loops_optimizer_begins_with_its_state():
    optimizer_of = OPTIMIZERS["momentum"]
    saved, _ = saved_and_expected(optimizer_of)
    fresh = saved[0], {**saved[1], "state": {}}
    ends = [
        pl.simulate(resumed(optimizer_of, one), workers=2, algorithm="downpour(apply=user)").returned[0]
        for one in (saved, fresh)
    ]
    assert not torch.allclose(*ends, atol=1e-3)


def test_momentum_of_a_workers_own_steps_between_fetches_is_not_the_servers(monkeypatch):
    optimizer_of, given = OPTIMIZERS["momentum"], []
    saved, _ = saved_and_expected(optimizer_of)
    monkeypatch.setattr(UserApplier, "begin_with", lambda applier, state: given.append(state))
    spec = "downpour(push=3, fetch=3, apply=user)"
    pl.simulate(resumed(optimizer_of, (saved[0], {**saved[1], "state": {}})), workers=2, algorithm=spec)
    assert not given
    pl.simulate(resumed(optimizer_of, saved), workers=2, algorithm=spec)
    momentum = torch.cat([one["momentum_buffer"].flatten() for one in saved[1]["state"].values()])
    assert len(given) == 2
    for state in given:
        torch.testing.assert_close(state["momentum_buffer"].sum(), momentum.sum())


def as_bytes(write):
    file = io.BytesIO()
    write(file)
    return torch.frombuffer(bytearray(file.getbuffer()), dtype=torch.uint8)


@pytest.mark.parametrize(
    "sent",
    [
        None,
        torch.ones(4),
        torch.arange(40, dtype=torch.uint8),
        state_to_bytes({"momentum_buffer": torch.ones(9)}, (0, 9)),  # of another shard
        as_bytes(lambda file: torch.save({"momentum_buffer": torch.ones(8)}, file)),
        as_bytes(lambda file: np.savez(file, momentum_buffer=np.array([print] * 8))),
        as_bytes(lambda file: np.savez(file, **{"momentum_buffer.bfloat16": np.ones(8)})),
        as_bytes(lambda file: np.savez(file, momentum_buffer=np.array(["one"] * 8))),
    ],
)
def test_a_message_that_is_no_state_is_its_senders_error(sent):
    with pytest.raises(MalformedMessageError):
        read_state(Received(1, 0, Message("state", x=sent)), torch.zeros(8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_shard_gets_its_elements_bit_for_bit(dtype):
    momentum = torch.randn(9, generator=torch.Generator().manual_seed(0)).to(dtype)
    sent = state_to_bytes({"momentum_buffer": momentum, "step": torch.tensor(3.0)}, (1, 9))
    found = read_state(Received(1, 0, Message("state", x=sent)), torch.zeros(8))
    assert found["step"] == 3
    assert found["momentum_buffer"].dtype == dtype
    assert torch.equal(found["momentum_buffer"], momentum[1:])
