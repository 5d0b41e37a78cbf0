"""What a simulated worker's `with` sets for PyTorch holds for that worker alone, and ends with it."""

import contextlib

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

import paceline as pl


class FunctionMode(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def default_dtype():
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


CONTEXTS = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "autocast in float16": lambda: torch.autocast("cpu", dtype=torch.float16, cache_enabled=False),
    "no autocast": lambda: torch.autocast("cpu", enabled=False),
    "anomalies": lambda: torch.autograd.set_detect_anomaly(True, check_nan=False),
    "device": lambda: torch.device("meta"),
    "default dtype": default_dtype,
    "parametrizations": parametrize.cached,
    "function mode": FunctionMode,
    "dispatch mode": DispatchMode,
    "saved tensors": torch.autograd.graph.save_on_cpu,
    "no gradients": torch.no_grad,
    "inference": torch.inference_mode,
}


def state():
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
        (torch.autocast_increment_nesting(), torch.autocast_decrement_nesting()),
        torch.is_anomaly_enabled(),
        torch.is_anomaly_check_nan_enabled(),
        torch.get_default_dtype(),
        torch.empty(1).device.type,
        parametrize._cache_enabled,
        [type(one) for one in torch.overrides._get_current_function_mode_stack()],
        [type(one) for one in _get_current_dispatch_mode_stack()],
        getattr(torch._C, "_autograd")._top_saved_tensors_default_hooks(False) is None,  # noqa: B009
    )


@pytest.mark.parametrize("kind", CONTEXTS)
def test_a_context_holds_for_its_worker(kind):
    """Workers meet inside it; worker 1 has no such context, and worker 2 is still in it when all have left."""
    caller, seen = state(), []

    def train():
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pl.attach(model, optimizer) as worker:
            for x in worker.batches([torch.ones(1, 2)] * 6):
                model(x).mean().backward()
                optimizer.step()
                outside = state()
                with CONTEXTS[kind]() if worker.worker_id != 1 else contextlib.nullcontext():
                    inside = state()
                    worker.mean(1.0)
                    seen.append((outside == caller, inside == state(), (inside == outside) is (worker.worker_id == 1)))
            if worker.worker_id == 2:
                CONTEXTS[kind]().__enter__()
            worker.mean(1.0)

    pl.simulate(train, workers=3, algorithm="all-reduce")
    assert seen == [(True, True, True)] * 6
    assert state() == caller


@pytest.mark.parametrize("algorithm", ["all-reduce", "lockstep", "parameter-server"])
@pytest.mark.parametrize("kind", ["anomalies", "parametrizations", "saved tensors", "function mode"])
def test_backward_and_step_inside_a_context(kind, algorithm):
    def trained(context):
        def train():
            torch.manual_seed(0)
            data = list(torch.randn(6, 3, 4))
            model = parametrizations.weight_norm(nn.Linear(4, 2))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with pl.attach(model, optimizer) as worker:
                for x in worker.batches(data):
                    optimizer.zero_grad()
                    with context():
                        model(x).square().mean().backward()
                        optimizer.step()
            return nn.utils.parameters_to_vector(model.parameters()).detach()

        return pl.simulate(train, workers=2, algorithm=algorithm).returned[0]

    torch.testing.assert_close(trained(CONTEXTS[kind]), trained(contextlib.nullcontext))


@pytest.mark.parametrize("context", [torch.inference_mode, torch.no_grad])
def test_a_mean_of_tensors_without_gradients(context):
    """As loops take it of a validation loss."""

    def train():
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pl.attach(model, optimizer) as worker:
            for x in worker.batches([torch.ones(1, 2)] * 4):
                model(x).mean().backward()
                optimizer.step()
            with context():
                return worker.mean(torch.full((2,), float(worker.worker_id)) * 2)

    run = pl.simulate(train, workers=2, algorithm="hogwild")
    assert [one.tolist() for one in run.returned.values()] == [[1.0, 1.0]] * 2
    assert not torch.is_inference_mode_enabled()
