"""Loops of a user's own under a tensor layout; each worker writes down what it has seen, and what it ends with."""

import contextlib
import os
import signal
from collections import defaultdict
from pathlib import Path

import torch

import paceline as pl
from model_parallel.tensor.model import BATCH, LAYERS, OPTIMIZERS, built, data, whole_gradient
from model_parallel.tensor.threads import CountedAxis
from paceline import model_parallel as mp
from paceline.model_parallel.tensor.traffic import Traffic

STEPS = 3


def loop(
    layout, out, *, optimizer="adamw", algorithm="all-reduce", replicas=1, steps=STEPS, epochs=1, dropout=0.1, clip=1.0,
    torch_clip=False, kill=None, frozen=None, batches=None, evaluates=False, blocks=LAYERS,
    bucket_bytes=None, passes=1, accumulates=False, is_stream=False,
):  # fmt: skip
    """Every replica's batch is one of `data`; worker 0's file has what the run comes to."""
    mesh = mp.Mesh.alone()
    mesh.bucket_bytes = bucket_bytes or mesh.bucket_bytes
    model = built(mesh, dropout=dropout, num_blocks=blocks)
    if frozen is not None:
        model.get_parameter(frozen).requires_grad_(False)
    one = OPTIMIZERS[optimizer](model.parameters())
    loader = [data(number) for number in range(batches if batches is not None else steps * replicas)]
    loader = Stream(loader) if is_stream else loader
    losses, gradients, norms, gains, step, sent = (
        [],
        [],
        [],
        [],
        0,
        None,
    )  # a run that is stopped leaves the `with` at once
    with pl.attach(model, one, algorithm, layout=layout, evaluate=test_loss if evaluates else None) as worker:
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        traffic = defaultdict(Traffic)
        mesh.axes.update({name: CountedAxis(name, axis, traffic) for name, axis in mesh.axes.items()})
        for _ in range(epochs):
            for batch in worker.batches(loader):
                tokens, following, more = (mesh.local_batch(part) for part in batch)
                more = mesh.local_features(more).clone().requires_grad_()
                one.zero_grad()
                for backward in range(passes):
                    is_last = backward == passes - 1
                    with worker.accumulate() if accumulates and not is_last else contextlib.nullcontext():
                        loss = model(tokens, following, more)
                        (loss / passes).backward()
                if torch_clip:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
                if clip is not None:
                    norms.append(worker.clip_grad_norm_(clip))
                worker.report(loss)
                if kill is not None and (worker.worker_id, step) == kill:
                    os.kill(os.getpid(), signal.SIGKILL)
                one.step()
                losses.append(loss.detach())
                gradients.append(whole_gradient(more.grad, mesh))
                gains.append(model.norm.weight.detach().clone())
                step += 1
        if worker.num_workers > 1:
            counts = worker._membership.ports.counts
            sent = counts.messages, counts.sent_bytes, {key: one.calls for key, one in traffic.items()}
    state = {name: dict(one.state.get(parameter, {})) for name, parameter in model.named_parameters()}
    found = {
        "losses": losses, "gradients": gradients, "norms": norms, "model": model.state_dict(), "state": state,
        "shapes": shapes, "gains": gains, "test loss": test_loss(model), "sent": sent,
    }  # fmt: skip
    torch.save(found, Path(out) / f"{worker.worker_id}.pt")


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, batches):
        self._batches = batches

    def __iter__(self):
        return iter(self._batches)


def test_loss(model):
    """Of a whole model, by one process."""
    is_training = model.training
    with torch.no_grad():
        loss = model.eval()(*data(99))
    model.train(is_training)
    return {"loss": float(loss)}


test_loss.__test__ = False


def found(out, worker=0):
    return torch.load(Path(out) / f"{worker}.pt", weights_only=False)


def alone(optimizer="adamw", *, replicas=1, steps=STEPS, epochs=1, dropout=0.1, clip=1.0, frozen=None):
    """One process with all replicas' samples as one batch, and the layers of one worker; without `paceline.attach`."""
    mesh = mp.Mesh.alone()
    model = built(mesh, dropout=dropout)
    if frozen is not None:
        model.get_parameter(frozen).requires_grad_(False)
    one = OPTIMIZERS[optimizer](model.parameters())
    losses, gradients, norms = [], [], []
    for step in (*range(steps),) * epochs:
        every = [data(step * replicas + replica) for replica in range(replicas)]
        tokens, following, more = (torch.cat(parts) for parts in zip(*every, strict=True))
        more.requires_grad_()
        one.zero_grad()
        loss = model(tokens, following, more)
        loss.backward()
        if clip is not None:
            norms.append(float(mp.clip_grad_norm(model, clip)))
        one.step()
        losses.append(loss.detach())
        gradients.append(more.grad)
    state = {name: dict(one.state.get(parameter, {})) for name, parameter in model.named_parameters()}
    return {"losses": losses, "gradients": gradients, "norms": norms, "model": model.state_dict(), "state": state}


def last_steps(found, number):
    """What a loop has found that has made so many steps only."""
    return {**found, **{name: found[name][-number:] for name in ("losses", "gradients", "norms")}}


def check_same(one, other, *, replicas=1, replica=0, tolerance=1e-12):
    """What a worker of that replica has seen, and all that it ends with."""
    close = {"rtol": 0.0, "atol": tolerance}
    if replicas == 1:
        for mine, theirs in zip(one["losses"], other["losses"], strict=True):
            torch.testing.assert_close(mine, theirs, **close)
    rows = slice(replica * BATCH, (replica + 1) * BATCH)
    for mine, theirs in zip(one["gradients"], other["gradients"], strict=True):
        torch.testing.assert_close(mine / replicas, theirs[rows], **close)
    assert len(one["norms"]) == len(other["norms"])
    for mine, theirs in zip(one["norms"], other["norms"], strict=True):
        assert abs(mine - theirs) <= tolerance
    assert one["model"].keys() == other["model"].keys()
    for name, value in other["model"].items():
        torch.testing.assert_close(one["model"][name], value, **close, msg=lambda text, n=name: f"{n}: {text}")
    for name, state in other["state"].items():
        assert one["state"][name].keys() == state.keys()
        for key, value in state.items():
            torch.testing.assert_close(one["state"][name][key], value, **close)
