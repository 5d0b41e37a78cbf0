"""A DataLoader with `num_workers` and a custom collate function."""

import torch.nn.functional as F

from loops.habits.collate import stacked
from loops.problem import EPOCHS, loader, made


def loop(attach):
    model, optimizer = made()
    batches = loader(collate_fn=lambda samples: stacked(samples), num_workers=2, persistent_workers=True)
    with attach(model, optimizer) as worker:
        for _ in range(EPOCHS):
            for batch in worker.batches(batches):
                optimizer.zero_grad()
                F.cross_entropy(model(batch["x"]), batch["y"]).backward()
                optimizer.step()
    return model
