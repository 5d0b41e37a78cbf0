"""A script that trains a part of a placed model, as PACELINE_TEST_PLACED describes it: `python placed_programs.py`."""

import json
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))

import paceline as pl
from model_parallel.models import BATCH, data, made
from processes.join_programs import enter_namespace


@dataclass
class Script:
    """What a worker does.

    Args:
        folder: of the plan, and of the models that the workers end with.
        plan: its file.
        worker: the part that it asks for; None: any.
        dies_in: the epoch in whose third step it kills itself.
        leaves: whether worker 0's loop leaves weights of its own in the model.
        namespace: the network that it is in.
    """

    folder: str
    name: str = "batch norm"
    plan: str = "plan.json"
    worker: int | None = None
    epochs: int = 2
    dies_in: int | None = None
    leaves: bool = False
    namespace: str | None = None

    def run(self):
        torch.set_num_threads(1)
        if self.namespace is not None:
            enter_namespace(self.namespace)
        part = pl.Plan.load(Path(self.folder, self.plan)).part(made(self.name), self.worker)
        optimizer, loader = torch.optim.Adam(part.parameters(), lr=0.01), batches(self.name)
        with pl.attach(part, optimizer) as worker:
            for epoch in range(self.epochs):
                for at, (x, y) in enumerate(worker.batches(loader)):
                    if (epoch, at) == (self.dies_in, 2):
                        os.kill(os.getpid(), signal.SIGKILL)
                    step(part, optimizer, x, y, worker.clip_grad_norm_)
                Path(self.folder, f"trains-{worker.worker_id}").touch()
            if self.leaves and worker.worker_id == 0:
                left_weights(part.whole)
        torch.save(part.whole.state_dict(), Path(self.folder, f"{worker.worker_id}.pt"))


def batches(name):
    return torch.utils.data.DataLoader(data(name), batch_size=BATCH)


def step(model, optimizer, x, y, clip):
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    clip(0.5)
    optimizer.step()


def left_weights(model):
    model.load_state_dict({name: torch.ones_like(value) for name, value in model.state_dict().items()})


def alone(name, epochs=2):
    """The state that one process ends with."""
    model = made(name)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(epochs):
        for x, y in batches(name):
            step(model, optimizer, x, y, lambda norm: torch.nn.utils.clip_grad_norm_(model.parameters(), norm))
    return model.state_dict()


if __name__ == "__main__":
    Script(**json.loads(os.environ["PACELINE_TEST_PLACED"])).run()
