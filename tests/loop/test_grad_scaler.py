"""GradScaler under `attach`: where one worker's gradients overflow, nobody waits for the step that it leaves out."""

import threading

import pytest
import torch
from torch import nn

import paceline as pl

BATCHES = [(torch.randn(6, 4, generator=torch.Generator().manual_seed(k)), torch.arange(6) % 3) for k in range(12)]


def run(algorithm, *, overflow=True, fused=False, unscale=False):
    """Two workers; the loss of batch 5, worker 1's third in lockstep, is infinite.

    Of each: its model right after its last step, its scale, how many steps it made.
    """
    results, lock = {}, threading.Lock()

    def loop():
        with lock:  # worker threads share torch's generator
            torch.manual_seed(1)
            model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=10**6)
        with pl.attach(model, optimizer) as worker:
            x, steps = [], 0  # racing for batches, a worker may get none
            for samples, labels in worker.batches(BATCHES):
                optimizer.zero_grad()
                factor = float("inf") if overflow and torch.equal(samples, BATCHES[5][0]) else 1.0
                scaler.scale(nn.functional.cross_entropy(model(samples), labels) * factor).backward()
                if unscale:
                    scaler.unscale_(optimizer)
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                x, steps = [p.detach().clone() for p in model.parameters()], steps + 1
        assert not any(hasattr(optimizer, name) for name in ("found_inf", "grad_scale"))
        with lock:
            results[worker.worker_id] = x, scaler.get_scale(), steps

    pl.launch(loop, workers=2, algorithm=algorithm, backend="threads")
    return results


def check_finite(found):
    for x, _, _ in found.values():
        assert all(torch.isfinite(p).all() for p in x)


@pytest.mark.filterwarnings("ignore::paceline.errors.ClippingWarning")  # under lockstep each clips its own gradient
@pytest.mark.parametrize("unscale", [False, True], ids=["", "unscaled and clipped by the loop"])
@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
@pytest.mark.parametrize("algorithm", ["all-reduce", "all-reduce(codec=sign)", "lockstep"])
def test_all_skip_what_one_cannot_use(algorithm, fused, unscale):
    found = run(algorithm, fused=fused, unscale=unscale)
    check_finite(found)
    assert [steps for *_, steps in found.values()] == [6, 6]
    assert all(torch.equal(a, b) for a, b in zip(found[0][0], found[1][0], strict=True))
    assert found[1][1] == 4.0
    assert found[0][1] == (8.0 if algorithm == "lockstep" else 4.0)


@pytest.mark.parametrize("algorithm", ["d-psgd", "local-sgd(period=2)", "local-sgd(warmup_steps=4)"])
def test_rounds_go_on_where_models_are_the_workers_own(algorithm):
    found = run(algorithm)
    check_finite(found)
    assert [steps for *_, steps in found.values()] == [6, 6]
    assert found[1][1] == 4.0


@pytest.mark.parametrize("algorithm", ["hogwild", "locked", "leashed", "ad-psgd"])
def test_asynchronous_methods_leave_it_out(algorithm):
    found = run(algorithm)
    check_finite(found)
    assert sum(steps for *_, steps in found.values()) == 12
    assert sorted(scale for _, scale, _ in found.values()) == [4.0, 8.0], "whoever got it, and nobody else, scales less"


@pytest.mark.parametrize("algorithm", ["all-reduce", "lockstep", "d-psgd"])
def test_without_an_overflow_scaling_changes_nothing(algorithm):
    """Scales are powers of two: dividing by them after the mean is dividing before it."""
    scaled, fused = run(algorithm, overflow=False), run(algorithm, overflow=False, fused=True)
    for worker in range(2):
        assert scaled[worker][1] == 8.0
        torch.testing.assert_close(scaled[worker][0], fused[worker][0])


def test_a_sharded_gradient_cannot_be_scaled():
    with pytest.raises(pl.PacelineError, match="nor scale them with GradScaler"):
        run("all-reduce(sharded=true)")


@pytest.mark.parametrize("algorithm", ["all-reduce", "all-reduce(codec=sign)"])
def test_float16_parameters_cannot_be_unscaled(algorithm):
    def loop():
        model = nn.Linear(4, 3).half()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu")
        with pl.attach(model, optimizer) as worker:
            for samples, _ in worker.batches(BATCHES):
                scaler.scale(model(samples.half()).sum()).backward()

    with pytest.raises(pl.PacelineError, match="cannot unscale gradients in float16: keep the parameters in float32"):
        pl.simulate(loop, workers=2, algorithm=algorithm)
