"""Loops of a placed model's replicas, and of the same model's plain workers, which take their steps in a given order."""

import math
import multiprocessing
import os
import signal
import threading
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
from torch.distributed import FileStore
from torch.nn import functional as F

import paceline as pl
from model_parallel.models import BATCH, TwoTowers, data, is_saved, made
from paceline.loop import looked_up_tables

_DEADLINE = timedelta(seconds=60)
_DRAWING = threading.Lock()  # workers in threads share PyTorch's random numbers


class Turns:
    """Lets one replica at a time make a step; its parts make it together.

    Args:
        order: the replicas, by turn.
        path: of a file through which the workers tell each other.
        parts: workers of a replica.
    """

    def __init__(self, order, path, parts, replicas):
        self.order, self._path = order, str(path)
        self._parts, self._workers = parts, parts * replicas

    def begin(self):
        """All workers have the first parameters when the first turn begins."""
        self._store = FileStore(self._path, -1)
        self._count("attached", self._workers, "turn 0")

    def wait(self, turn):
        self._store.wait([f"turn {turn}"], _DEADLINE)

    def end(self, turn):
        self._count(f"ended {turn}", self._parts, f"turn {turn + 1}")

    def _count(self, what, number, then):
        if self._store.add(what, 1) == number:
            self._store.set(then, "")


def taken_in_turns(name, order, algorithm, plan, out, *, replicas=2, backend="processes", **settings):
    """By replica: what its workers saw and ended with; without a plan, each replica is a plain worker."""
    parts = plan.workers if plan is not None else 1
    out.mkdir()
    loop = partial(in_turns, name, plan, Turns(order, out / "turns", parts, replicas), out, **settings)
    pl.launch(loop, workers=parts * replicas, plan=plan, algorithm=algorithm, backend=backend)
    return [found(out, worker) for worker in range(parts * replicas)]


def in_turns(name, plan, turns, out, *, clip=None, push=None):
    """`push`: steps between two pushes that travel during the next step; the next turn begins once they are applied."""
    with _DRAWING:
        model, loader = made(name), batches(name, len(turns.order))
    called = plan.part(model) if plan is not None else model
    optimizer = torch.optim.SGD(called.parameters(), lr=0.05, momentum=0.9)
    parts = plan.workers if plan is not None else 1
    losses, norms = [], []
    with pl.attach(called, optimizer) as worker:
        turns.begin()
        own = iter(worker.batches(loader))
        for turn, whose in enumerate(turns.order):
            if whose != worker.worker_id // parts:
                continue
            turns.wait(turn)
            x, y = next(own)
            optimizer.zero_grad()
            take_step(worker, F.cross_entropy(called(x), y), optimizer, losses, norms, clip=clip)
            if push is not None:
                wait_for_pushes(worker, turns.order[: turn + 1], push)
            turns.end(turn)
    save({"losses": losses, "norms": norms, "model": model.state_dict()}, out, worker)


def take_step(worker, loss, optimizer, losses, norms, *, clip=None):
    loss.backward()
    if clip is not None:
        norms.append(worker.clip_grad_norm_(clip))
    worker.report(loss)
    optimizer.step()
    losses.append(loss.item())


def wait_for_pushes(worker, taken, push):
    """`taken`: the replicas that have made a step, by turn; each pushes after `push` of its own."""
    version = sum(taken.count(one) // push for one in set(taken))
    wait_until(lambda: worker._membership.arena.shared.version >= version)


def train(
    name, plan, out, *, steps=5, epochs=1, kill=None, clip=None, evaluates=False, make=None, least_bytes=None, names=None,
    uneven=False, saved=None, holds=None, torch_clip=False, fetches=None,
    outlives=None,
):  # fmt: skip
    """`kill`: a worker, and the step in whose middle it ends itself: or two, four, ... later, once the run is `saved`.

    Until then its steps take 50 ms more, as all that it makes is made again in runs that are compared.
    `holds`: the step in whose middle worker 0 waits for the run's end. `outlives`: a worker that must have ended before this
    one's third step.
    """
    if least_bytes is not None:
        looked_up_tables.LEAST_BYTES = least_bytes
    model = (make or partial(made, name))()
    called = plan.part(model) if plan is not None else model
    optimizer = torch.optim.SGD(called.parameters(), lr=0.05, momentum=0.9 if make is None else 0.0)
    loader = batches(name, steps)
    if uneven:
        loader[-1] = tuple(one[:-1] for one in loader[-1])
    losses, drawn, step, fetched = [], [], 0, {}
    with pl.attach(called, optimizer, names, evaluate=test_loss if evaluates else None) as worker:
        counts = worker._membership.ports.counts
        for _ in range(epochs):
            for x, y in worker.batches(loader):
                optimizer.zero_grad()
                drawn.append(torch.rand(()).item())
                loss = F.cross_entropy(called(x), y)
                is_due = kill is not None and worker.worker_id == kill[0] and step >= kill[1]
                if is_due and step % 2 == kill[1] % 2 and is_saved(saved):
                    os.kill(os.getpid(), signal.SIGKILL)
                if is_due:
                    time.sleep(0.05)
                if (worker.worker_id, step) == (0, holds):
                    hold(worker._membership.arena)
                if step == 2 and outlives not in (None, worker.worker_id) and worker.worker_id != kill[0]:
                    wait_until(lambda: worker._membership.arena.has_ended(outlives))
                loss.backward()
                if clip is not None:
                    worker.clip_grad_norm_(clip)
                if torch_clip:
                    torch.nn.utils.clip_grad_norm_(called.parameters(), 0.01)
                worker.report(loss)
                optimizer.step()
                losses.append(loss.item())
                step += 1
        if fetches is not None:
            fetched = {"fetched": called.fetch(fetches, x), "computed": model.get_submodule(fetches)(x).detach()}
    seen = {"losses": losses, "model": model.state_dict(), "sent": counts.sent_bytes, "test loss": test_loss(model)}
    save({**seen, "drawn": drawn, **fetched}, out, worker)


def hold(arena):
    """Waits until the run is being stopped, and worker 1 has had the time to notice."""
    while not arena.is_stopped:
        time.sleep(1e-3)
    until_s = time.monotonic() + 1.0
    while not arena.has_ended(1) and time.monotonic() < until_s:
        time.sleep(1e-3)


def batches(name, number):
    return list(torch.utils.data.DataLoader(data(name, steps=number), batch_size=BATCH))


@torch.no_grad()
def test_loss(model):
    x, y = batches("two towers", 1)[0]
    return {"loss": float(F.cross_entropy(model(x), y)) if isinstance(model, TwoTowers) else math.nan}


test_loss.__test__ = False


def found(out, worker=0):
    return torch.load(Path(out) / f"{worker}.pt", weights_only=False)


def save(seen, out, worker):
    torch.save(seen, Path(out) / f"{worker.worker_id}.pt")


def wait_until(is_so):
    until_s = time.monotonic() + _DEADLINE.total_seconds()
    while not is_so():
        assert time.monotonic() < until_s
        time.sleep(1e-3)


def killing_server(server_id):
    """For `on_progress`: kills the process of this server, once, after five updates."""
    killed = []

    def kill(progress):
        if progress.version > 5 and not killed:
            [server] = [one for one in multiprocessing.active_children() if one.name == f"paceline-worker-{server_id}"]
            killed.append(server.pid)
            os.kill(server.pid, signal.SIGKILL)

    return kill
