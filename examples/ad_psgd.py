"""AD-PSGD: everyone trains at its own pace and averages with one neighbour at a time, meanwhile.

    python examples/ad_psgd.py [EPOCHS]
    python examples/ad_psgd.py [EPOCHS] --simulate 128
    torchrun --standalone --nproc-per-node 4 examples/ad_psgd.py [EPOCHS]
    paceline launch --workers 4 -- examples/ad_psgd.py [EPOCHS]

One function, four ways to run it: workers of this machine, a simulated cluster under a virtual clock (worker 0 computes ten
times as slowly as the others, and holds nobody up), and workers on any number of machines, which torchrun ends when one
of them dies and `paceline launch` does not.
"""

import os
import sys

import torch
from torch import nn

import paceline as pl
from digits import accuracy, make_loader, make_model

SIMULATED = int(sys.argv[-1]) if "--simulate" in sys.argv else 0
EPOCHS = int(sys.argv[1]) if sys.argv[1:] and sys.argv[1].isdigit() else 40
ALGORITHM = pl.ADPSGD(topology=pl.BipartiteExponential())


def train() -> dict:
    model, loader = make_model(), make_loader(batch_size=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    with pl.attach(model, optimizer, algorithm=ALGORITHM) as worker:
        for _ in range(EPOCHS):
            for images, labels in worker.batches(loader):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(images), labels)
                loss.backward()
                optimizer.step()
                worker.report(loss)
    if worker.worker_id == 0:
        print(f"test accuracy {accuracy(model):.3f}", flush=True)
    return worker.summary()


def show(staleness: dict, distance: float) -> None:
    print(f"mean staleness {staleness['mean']:.2f}, consensus distance {distance:.3g}\n", end="", flush=True)  # at once


if __name__ == "__main__":
    if (
        "WORLD_SIZE" in os.environ or "PACELINE_JOIN" in os.environ
    ):  # torchrun or paceline launch has started the workers
        figures = train()
        show(figures["staleness"], figures["consensus_distance"])
    elif SIMULATED:
        run = pl.simulate(train, cluster=pl.Cluster(workers=SIMULATED).slow(worker=0, factor=10))
        show(run.result["staleness"], run.returned[0]["consensus_distance"])
        print(f"{run.result['wall_s']:.2f} s of virtual time; share of updates {run.result['share_of_updates'][0]:.2%}")
    else:
        result = pl.launch(train, workers=2).result
        print(f"{result['steps']} gradients, {result['averages_per_step'] / 2:.2f} averages of a pair for each")
