"""Draws the lanes of docs/which_algorithm.md from two real runs: three workers, one of which sleeps in every step of its loop.

    python docs/make_lanes.py

Writes docs/lanes-light.svg and docs/lanes-dark.svg. Times differ from run to run and from machine to machine; what does
not is who waits for whom. Needs an otherwise idle core or two.
"""

import time
from pathlib import Path

import torch
from lanes import lanes_svg
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl

SLOW_WORKER, GRADIENT_S, TIMES_SLOWER = 0, 0.004, 4


def train() -> None:
    digits = load_digits()
    images, labels = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    loader = DataLoader(TensorDataset(images, labels), batch_size=16, shuffle=True)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pl.attach(model, optimizer) as worker:
        # Sleeping stands for the gradient of a larger model, so that the workers do not compete for two cores.
        gradient_s = GRADIENT_S * (TIMES_SLOWER if worker.worker_id == SLOW_WORKER else 1)
        for _ in range(3):
            for x, y in worker.batches(loader):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                time.sleep(gradient_s)
                optimizer.step()
                worker.report(loss)


if __name__ == "__main__":
    runs = [pl.launch(train, workers=3, algorithm=algorithm) for algorithm in ("lockstep", "leashed")]
    for scheme in ("light", "dark"):
        path = Path(__file__).with_name(f"lanes-{scheme}.svg")
        path.write_text(lanes_svg(runs, duration_s=0.12, dark=scheme == "dark"))
        print(f"{path.name}: {path.stat().st_size / 1024:.0f} KiB")
