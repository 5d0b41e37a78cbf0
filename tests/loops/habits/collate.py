"""A custom collate function."""

import torch
import torch.nn.functional as F

from loops.problem import EPOCHS, loader, made


def stacked(samples):
    """Features and labels, in one dictionary."""
    return {"x": torch.stack([x for x, _ in samples]), "y": torch.stack([y for _, y in samples])}


def loop(attach):
    model, optimizer = made()
    with attach(model, optimizer) as worker:
        for _ in range(EPOCHS):
            for batch in worker.batches(loader(collate_fn=stacked)):
                optimizer.zero_grad()
                F.cross_entropy(model(batch["x"]), batch["y"]).backward()
                optimizer.step()
    return model
