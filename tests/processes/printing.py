"""Workers that print, and bring figures together: `python printing.py`, under `paceline.launch` or torchrun."""

import os
import signal
import sys

import torch
from torch import nn

import paceline as pl
from paceline.membership.environment import current_environment


def prints():
    own_id = current_environment().worker_id
    print("out of worker", own_id)
    print("errors of worker", own_id, file=sys.stderr)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pl.attach(model, optimizer):
        print("step", end=" ")
        train(model, optimizer)
        print("made", flush=True)
    print("the end", end="")


def train(model, optimizer):
    model(torch.rand(3, 2)).sum().backward()
    optimizer.step()


def adds():
    """Worker 1 of three is killed before it brings its second figure."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pl.attach(model, optimizer) as worker:
        train(model, optimizer)
        first = worker.sum(10.0**worker.worker_id)
        if worker.worker_id == 1 and type(worker.algorithm).__name__ == "Hogwild":
            os.kill(os.getpid(), signal.SIGKILL)
        os.write(1, f"{first} {worker.mean(torch.tensor([1.0 + worker.worker_id])).tolist()}\n".encode())


def evaluated():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pl.attach(model, optimizer, evaluate=lambda model: 0.5):
        print("a line that goes nowhere")
        train(model, optimizer)


if __name__ == "__main__":
    if sys.argv[1] == "adds":
        adds()
    elif sys.argv[1] == "evaluated":
        for backend in sys.argv[3:]:
            pl.launch(evaluated, workers=2, algorithm="hogwild", backend=backend, out=f"{sys.argv[2]}/{backend}")
    else:
        pl.launch({"launched": adds, "prints": prints}[sys.argv[1]], workers=3, algorithm="hogwild")
