"""One worker skips a step with `continue` after `backward`, as where its gradient is too large."""

import torch.nn.functional as F

from loops.problem import EPOCHS, loader, made


def loop(attach):
    model, optimizer = made()
    with attach(model, optimizer) as worker:
        for epoch in range(EPOCHS):
            for number, (x, y) in enumerate(worker.batches(loader())):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                if epoch == 1 and number == 2 and worker.worker_id == worker.num_workers - 1:
                    continue
                optimizer.step()
    return model
