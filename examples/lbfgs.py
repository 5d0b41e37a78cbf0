"""L-BFGS on the whole data set, divided among workers: each evaluation of the loss is a round of all of them.

    python examples/lbfgs.py [EPOCHS]

Three workers have a third of the images each, in lockstep; then one process minimizes the loss of all images at once. Every
worker makes the same line searches, because each gets the mean loss and the mean gradient: no coordinator is needed.
"""

import sys
from functools import partial

import torch
from torch import nn

import paceline as pl
from digits import accuracy, make_loader, make_model

EPOCHS = int(sys.argv[1]) if sys.argv[1:] else 5


def train(batch_size: int) -> None:
    torch.set_num_threads(1)
    model = make_model().double()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=10, line_search_fn="strong_wolfe")

    def closure(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images.double()), labels)
        loss.backward()
        return loss

    with pl.attach(model, optimizer) as worker:
        for _ in range(EPOCHS):
            for images, labels in worker.batches(make_loader(batch_size)):
                loss = optimizer.step(partial(closure, images, labels))
    if worker.worker_id == 0:
        length = nn.utils.parameters_to_vector(model.parameters()).norm().item()
        print(f"loss {loss:.6f}, length of the parameters {length:.6f}", flush=True)
        print(f"test accuracy {accuracy(model.float()):.3f}", flush=True)


if __name__ == "__main__":
    pl.launch(partial(train, batch_size=479), workers=3, algorithm="lockstep")
    train(batch_size=1437)
