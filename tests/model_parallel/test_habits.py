"""What loops do with a placed model: it comes to what it does in one process, or is refused, with what to do instead."""

import threading
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import paceline as pl
from model_parallel.models import BATCH, data, made, planned
from paceline.model_parallel.graph import in_threads

NAME = "two towers"


def example(dtype=torch.float32):
    return data(NAME, dtype)[:BATCH][0]


def clipped(part, optimizer, worker, loss):
    loss.backward()
    torch.nn.utils.clip_grad_norm_(part.parameters(), 1e6)
    optimizer.step()


def scaled(part, optimizer, worker, loss):
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss).backward()
    scaler.step(optimizer)


def under_autocast(part, optimizer, worker, loss):
    with torch.autocast("cpu", torch.bfloat16):
        part(example(torch.float64))


def with_input_gradient(part, optimizer, worker, loss):
    part(example(torch.float64).requires_grad_())


def twice(part, optimizer, worker, loss):
    loss.backward(create_graph=True)


def gradients(part, optimizer, worker, loss):
    torch.autograd.grad(loss, list(part.parameters()))


def of_some_inputs(part, optimizer, worker, loss):
    loss.backward(inputs=list(part.parameters()))


def refused(plan, habit):
    part = plan.part(made(NAME))
    optimizer = torch.optim.Adam(part.parameters(), lr=0.01)
    with pl.attach(part, optimizer) as worker:
        for x, y in worker.batches(torch.utils.data.DataLoader(data(NAME), batch_size=BATCH)):
            habit(part, optimizer, worker, F.cross_entropy(part(x), y))
            return  # the first step, or nothing, has said no


@pytest.mark.parametrize(
    ("habit", "says"),
    [
        (clipped, r"clip by worker\.clip_grad_norm_"),
        (scaled, "GradScaler"),
        (under_autocast, r"Under torch\.autocast"),
        (with_input_gradient, "Inputs of a placed model get no gradient"),
        (twice, "leave out inputs= and create_graph=True"),
        (gradients, r"read p\.grad instead of torch\.autograd\.grad"),
        (of_some_inputs, "leave out inputs= and create_graph=True"),
    ],
)
def test_what_workers_would_do_differently_is_refused_in_the_first_step(habit, says):
    plan = planned(NAME, 2)
    with pytest.raises(pl.UsageError, match=says):
        pl.launch(partial(refused, plan, habit), workers=2, plan=plan)


def of_one_parameter(part, loss):
    torch.autograd.grad(loss, next(part.parameters()))


def of_the_last(part, loss):
    torch.autograd.grad(loss, list(part.parameters())[-1:])


def after_a_whole_pass(part, loss):
    loss.backward(retain_graph=True)
    torch.autograd.grad(loss, list(part.parameters()))


def of_gradients(part, loss):
    loss.backward(create_graph=True)


def of_several_losses(part, loss):
    torch.autograd.backward([loss, 2 * loss], inputs=list(part.parameters()))


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("name", ["two towers", "0-1-0", "read by three", "returned"])
def test_each_worker_refuses_passes_whose_gradients_no_message_brings(name, monkeypatch):
    monkeypatch.setattr(in_threads, "_DEADLINE_S", 20.0)
    plan, said = planned(name, 2), []

    def work(part, pass_back):
        out = part(data(name)[:BATCH][0])
        with pytest.raises(pl.UsageError, match=r"call loss\.backward\(\) and read p\.grad"):
            pass_back(part, sum(one.sum() for one in (out if isinstance(out, tuple) else (out,))))
        said.append(part.worker)

    passes = (of_one_parameter, of_the_last, after_a_whole_pass, of_gradients, of_several_losses)
    for one in passes:
        in_threads.run_parts(plan, [made(name) for _ in range(2)], partial(work, pass_back=one))
    assert sorted(said) == [0] * len(passes) + [1] * len(passes)


def test_passes_that_reach_no_other_worker_are_those_of_one_process():
    """Of a loss by the model's output, a second whole pass, and those of a plan for one worker."""
    model, x, both = made(NAME), data(NAME)[:BATCH][0], threading.Barrier(2, timeout=60)

    def work(part, wait=both.wait):
        out = part(x)
        loss = out.square().sum()
        (of_output,) = torch.autograd.grad(loss, out, retain_graph=True)
        loss.backward(retain_graph=True)
        wait()  # messages in memory have no queue
        torch.autograd.backward(loss)
        return of_output, {name: one.grad for name, one in part.named_parameters()}

    of_output, expected = work(model, lambda: None)
    found = in_threads.run_parts(planned(NAME, 2), [made(NAME) for _ in range(2)], work)
    assert all(torch.equal(one, of_output) for one, _ in found)
    seen = found[0][1] | found[1][1]
    assert seen.keys() == expected.keys()
    assert all(torch.equal(seen[name], one) for name, one in expected.items())
    part = planned(NAME, 1).part(made(NAME))
    own = torch.autograd.grad(part(x).square().sum(), list(part.parameters()))
    assert all(
        torch.equal(2 * one, expected[name]) for one, (name, _) in zip(own, part.named_parameters(), strict=True)
    )


def habits(model, batches):
    """Validation between steps, passes that accumulate, a penalty, a sum, clipping; a worker with a frozen tower only."""
    own = dict(model.named_parameters())
    for parameter in own.values():
        if parameter.requires_grad:
            parameter.register_hook(lambda gradient: gradient.clamp(-0.05, 0.05))
    optimizer = torch.optim.Adam(own.values(), lr=0.01)
    clip = partial(torch.nn.utils.clip_grad_norm_, own.values())
    seen = []

    def loop(batches):
        for x, y in batches:
            for mode in (torch.no_grad, torch.inference_mode):
                with mode():
                    seen.append(F.cross_entropy(model(x), y).item())
            optimizer.zero_grad()
            for number in (1, 2):
                penalty = 0.01 * sum(one.square().sum() for one in own.values())
                (F.cross_entropy(model(number * x), y, reduction="sum") + penalty).backward()
            seen.append(float(clip(0.1)))
            optimizer.step()

    if batches is not None:
        loop(batches)
        return seen
    with pl.attach(model, optimizer) as worker:
        clip = worker.clip_grad_norm_
        loop(worker.batches(loader()))
    return seen


def loader():
    return torch.utils.data.DataLoader(data(NAME), batch_size=BATCH)


def partly_frozen():
    model = made(NAME)
    model.b.requires_grad_(False)
    model.head.weight.requires_grad_(False)
    return model


def of_a_worker(plan, folder):
    part = plan.part(partly_frozen())
    torch.save((habits(part, None), part.whole.state_dict()), Path(folder) / f"{part.worker}.pt")


@pytest.mark.parametrize("workers", [1, 2])
def test_habits_that_are_right_are_those_of_one_process(workers, tmp_path):
    plan = planned(NAME, workers)
    model = partly_frozen()
    seen = habits(model, loader())
    pl.launch(partial(of_a_worker, plan, tmp_path), workers=workers, plan=plan)
    for worker in range(workers):
        found, state = torch.load(tmp_path / f"{worker}.pt")
        assert found == seen
        assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
