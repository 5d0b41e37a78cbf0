"""A loop that seeds as everybody does and draws its own batches: `python drawing.py FOLDER`, or as a launched function."""

import json
import os
import random
import signal
import sys
from pathlib import Path

import torch
from torch import nn

import paceline as pl
from paceline.membership.environment import current_environment

STEPS = 5


def loop(folder, dies_at=None):
    """Writes down what each worker's every incarnation drew: the batches' sums, and one of Python's numbers."""
    torch.manual_seed(1337)
    random.seed(1337)
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with pl.attach(model, optimizer) as worker:
        environment = current_environment()
        incarnation = environment.incarnation if environment is not None else 0
        seen = []
        for _ in range(STEPS):
            x = torch.randn(4, 6)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            seen.append(x.sum().item())
            (folder / f"{worker.worker_id}-{incarnation}").write_text(json.dumps([seen, random.random()]))
            if len(seen) == dies_at and (worker.worker_id, incarnation) == (1, 0):
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
    return worker


def drawn(folder):
    """By worker and incarnation."""
    return {path.name: json.loads(path.read_text()) for path in folder.iterdir() if path.name[1:2] == "-"}


if __name__ == "__main__":
    loop(Path(sys.argv[1]))
