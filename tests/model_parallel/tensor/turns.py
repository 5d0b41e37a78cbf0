"""Loops of replicas that take their steps in a given order, so that Downpour's servers apply pushes in that order."""

import threading

import paceline as pl
from model_parallel.replica_loops import save, take_step, wait_for_pushes
from model_parallel.tensor.model import OPTIMIZERS, built, data
from paceline import model_parallel as mp

_DEADLINE_S = 60.0


class Turns:
    """Lets one replica at a time make a step; its parts make it together.

    Args:
        order: the replicas, by turn.
        parts: workers of a replica.
        workers: of the run, who all have the first parameters when the first turn begins.
    """

    def __init__(self, order, parts, workers):
        self.order, self._parts = order, parts
        self.all_attached = threading.Barrier(workers, timeout=_DEADLINE_S)
        self._condition = threading.Condition()
        self._turn, self._left = 0, parts

    def begin(self, turn):
        with self._condition:
            assert self._condition.wait_for(lambda: self._turn == turn, _DEADLINE_S)

    def end(self):
        with self._condition:
            self._left -= 1
            if not self._left:
                self._turn, self._left = self._turn + 1, self._parts
                self._condition.notify_all()


def loop(turns, layout, out, algorithm, *, optimizer="momentum", clip=None, push=None):
    """`push`: steps between two pushes that travel during the next step; the next turn begins once they are applied."""
    mesh = mp.Mesh.alone()
    model = built(mesh)
    one = OPTIMIZERS[optimizer](model.parameters())
    loader = [data(number) for number in range(len(turns.order))]
    losses, norms = [], []
    with pl.attach(model, one, algorithm, layout=layout) as worker:
        replica = mesh.replica if layout is not None else worker.worker_id
        turns.all_attached.wait()
        batches = iter(worker.batches(loader))
        for turn, whose in enumerate(turns.order):
            if whose != replica:
                continue
            turns.begin(turn)
            tokens, following, more = (mesh.local_batch(part) for part in next(batches))
            one.zero_grad()
            loss = model(tokens, following, mesh.local_features(more))
            take_step(worker, loss, one, losses, norms, clip=clip)
            if push is not None:
                wait_for_pushes(worker, turns.order[: turn + 1], push)
            turns.end()
    save({"losses": losses, "norms": norms, "model": model.state_dict()}, out, worker)
