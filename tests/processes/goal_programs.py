"""A loop whose `evaluate` does what users' do, or what they should not."""

import os
import random
import signal
import threading

import numpy as np
import torch
from torch import nn

import paceline as pl
from paceline.membership.environment import current_environment

X = torch.randn(240, 6, generator=torch.Generator().manual_seed(3))
Y = (X[:, :1] > 0).float()
DATA = torch.utils.data.TensorDataset(X, Y)


class Loop:
    """A classifier of two classes. With threads, what it saw is in `seen`, and workers that came to the end in `after`.

    Args:
        epochs: so many.
        evaluate: what kind of function; None: none.
        dies_at: the batch at which worker 0 is killed.
        until: a file with which the epoch that is under way is the last.
    """

    def __init__(self, epochs=6, evaluate="right", dies_at=None, until=None):
        self.epochs = epochs
        self.until = until
        self.kind = evaluate
        self.dies_at = dies_at
        self.seen = []
        self.after = {}

    def evaluate(self, model):
        assert not model.training
        assert not torch.is_grad_enabled()
        random.random(), np.random.rand(), torch.rand(1)
        if self.kind == "raises":
            raise KeyError("no such label")
        self.seen.append(nn.utils.parameters_to_vector(model.parameters()).detach().clone())
        if self.kind == "incarnation":
            return float(current_environment().incarnation)
        return {"accuracy": float(((model(X) > 0).float() == Y).float().mean()), "loss": 1.5}

    def __call__(self):
        if threading.current_thread() is threading.main_thread():
            torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1))
        with torch.no_grad():
            for number, parameter in enumerate(model.parameters()):
                parameter.copy_(torch.linspace(-1, 1 + number, parameter.numel()).sin().view_as(parameter))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = torch.utils.data.DataLoader(DATA, batch_size=10, shuffle=True)
        evaluate = self.evaluate if self.kind else None
        batches = 0
        with pl.attach(model, optimizer, evaluate=evaluate) as worker:
            for _ in range(self.epochs):
                for x, y in worker.batches(loader):
                    optimizer.zero_grad()
                    loss = nn.functional.binary_cross_entropy_with_logits(model(x), y)
                    loss.backward()
                    optimizer.step()
                    worker.report(loss)
                    batches += 1
                    first = current_environment().incarnation == 0
                    if self.dies_at == batches and worker.worker_id == 0 and first:
                        os.kill(os.getpid(), signal.SIGKILL)
                if self.until is not None and self.until.exists():
                    break
        self.after[worker.worker_id] = nn.utils.parameters_to_vector(model.parameters()).detach()
