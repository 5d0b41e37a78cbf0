"""The user's loop under `all-reduce(sharded=true)`: every worker keeps the optimizer's state of its own strips only."""

import threading

import pytest
import torch
from torch import nn

import paceline as pl

BATCHES = [(torch.randn(6, 4, generator=torch.Generator().manual_seed(k)), torch.arange(6) % 3) for k in range(16)]
OPTIMIZERS = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.5),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.5, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01, amsgrad=True),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.1),
}


class Loop:
    """A loop, with what its workers end with: parameters, the optimizer's state, and its largest share during the run."""

    def __init__(self, make_optimizer, change=lambda model: None, steps_before=0):
        self.make_optimizer, self.change, self.steps_before = make_optimizer, change, steps_before
        self.results, self.shares, self.lock = {}, {}, threading.Lock()

    def __call__(self):
        with self.lock:  # worker threads share torch's generator
            torch.manual_seed(1)
            model = nn.Sequential(nn.Linear(4, 30), nn.Tanh(), nn.Linear(30, 3))
        weights = [model[0].weight, model[2].weight]
        biases = {"params": [model[0].bias, model[2].bias], "weight_decay": 0.0}
        optimizer = self.make_optimizer([{"params": weights}, biases])
        for x, y in BATCHES[: self.steps_before]:
            self.backward(model, optimizer, x, y)
            optimizer.step()
        with pl.attach(model, optimizer) as worker:
            for x, y in worker.batches(BATCHES):
                self.backward(model, optimizer, x, y)
                self.change(model)
                optimizer.step()
            kept = sum(
                v.numel() for one in optimizer.state.values() for v in one.values() if torch.is_tensor(v) and v.dim()
            )
        with self.lock:
            self.shares[worker.worker_id] = kept
            self.results[worker.worker_id] = [p.detach().clone() for p in model.parameters()], optimizer.state_dict()

    def backward(self, model, optimizer, x, y):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()


def run(algorithm, *loop, **more):
    loop = Loop(*loop, **more)
    pl.launch(loop, workers=3, algorithm=algorithm, backend="threads")
    return loop


def check_equal(state, expected):
    assert state["param_groups"] == expected["param_groups"]
    assert state["state"].keys() == expected["state"].keys()
    for index, one in expected["state"].items():
        assert state["state"][index].keys() == one.keys()
        for name, value in one.items():
            if torch.is_tensor(value):
                assert torch.equal(state["state"][index][name], value)
                assert state["state"][index][name].stride() == value.stride()
            else:
                assert state["state"][index][name] == value


@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20], ids=["a bucket per parameter", "one bucket"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_equals_all_reduce_bit_for_bit(name, bucket_bytes):
    """Parameters, and the optimizer's state on exit, of an optimizer that has made two steps before."""
    expected = run(f"all-reduce(bucket_bytes={bucket_bytes})", OPTIMIZERS[name], steps_before=2)
    sharded = run(f"all-reduce(sharded=true, bucket_bytes={bucket_bytes})", OPTIMIZERS[name], steps_before=2)
    for worker in range(3):
        x, state = sharded.results[worker]
        assert all(torch.equal(a, b) for a, b in zip(x, expected.results[worker][0], strict=True))
        check_equal(state, expected.results[worker][1])
    # Each has kept its own strips only: in all as much as one worker of plain all-reduce.
    assert sum(sharded.shares.values()) == expected.shares[0]
    assert max(sharded.shares.values()) <= 0.6 * expected.shares[0]


def test_clipping_is_refused():
    with pytest.raises(pl.PacelineError, match="use all-reduce without sharded"):
        run("all-reduce(sharded=true)", OPTIMIZERS["sgd"], lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.1))


def test_an_optimizer_that_looks_at_whole_parameters_is_refused():
    class PerParameterNorm(torch.optim.SGD):
        pass

    with pytest.raises(pl.PacelineError, match="PerParameterNorm may not allow"):
        run("all-reduce(sharded=true)", lambda groups: PerParameterNorm(groups, lr=0.1))
