"""A recommender with tables of a million rows: servers hold them, and only the rows of a batch travel.

    python examples/recommender.py [EPOCHS]

Four workers of this machine train a table of users and one of items by SparseAdam, and a bias by Adam. Prints how many
bytes a worker sends in a step; with dense gradients it would be all parameters, 64 MB.
"""

import sys

import torch
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader, Subset

import paceline as pl
from paceline.tasks.clicks import Recommender, clicks

EPOCHS = int(sys.argv[1]) if sys.argv[1:] else 3
BATCH_SIZE, SAMPLES = 128, 64_000


def train() -> None:
    torch.set_num_threads(1)
    task = clicks()
    train_set, test_set = task.load()
    loader = DataLoader(Subset(train_set, range(SAMPLES)), BATCH_SIZE, shuffle=True)
    model = Recommender()
    optimizers = [
        torch.optim.SparseAdam([model.users.weight, model.items.weight], lr=0.01),
        torch.optim.Adam([model.bias], lr=0.01),
    ]
    with pl.attach(model, optimizers, algorithm="parameter-server(mode=async)") as worker:
        for _ in range(EPOCHS):
            for pairs, clicked in worker.batches(loader):
                for one in optimizers:
                    one.zero_grad()
                loss = binary_cross_entropy_with_logits(model(pairs), clicked)
                loss.backward()
                for one in optimizers:
                    one.step()
                worker.report(loss)
    if worker.worker_id == 0:
        print(f"test accuracy {task.evaluate(model, test_set)['accuracy']:.3f}", flush=True)


if __name__ == "__main__":
    result = pl.launch(train, workers=4).result
    print(f"{result['steps']} updates, {result['bytes_per_step'] / 1000:.1f} KB sent per step")
