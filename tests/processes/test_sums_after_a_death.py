"""`worker.sum` after each epoch, in an asynchronous run that replaces a killed worker."""

import json
import os
import signal
from functools import partial

import pytest
import torch
from torch import nn

import paceline as pl
from leftovers import wait_until

EPOCHS, WORKERS = 5, 3
BATCHES = [torch.full((2, 3), float(number)) for number in range(12)]


def loop(folder):
    """Worker 1 dies with its first batch of epoch 1; the others do not begin epoch 3 before its replacement has a batch."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    dead, back, sums = folder / "dead", folder / "back", []
    with pl.attach(model, optimizer) as worker:
        for epoch in range(EPOCHS):
            if worker.worker_id != 1 and epoch in (1, 3):
                wait_until((dead if epoch == 1 else back).exists, "the other worker")
            steps = 0
            for x in worker.batches(BATCHES):
                if worker.worker_id == epoch == 1:
                    dead.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                if worker.worker_id == 1 and epoch == 3:
                    back.touch()
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
                steps += 1
            sums.append(worker.sum(torch.tensor([steps, 1, epoch])).tolist())
    (folder / f"{worker.worker_id}.json").write_text(json.dumps(sums))


@pytest.mark.parametrize("algorithm", ["hogwild", "parameter-server", "ad-psgd"])
def test_a_replacement_adds_to_the_sums_of_its_epoch(tmp_path, algorithm):
    run = pl.launch(partial(loop, tmp_path), workers=WORKERS, algorithm=algorithm, restarts=1)
    assert (run.result["outcome"], run.result["workers_lost"], run.result["restarts"]) == ("stopped", [1], 1)
    one, replacement, other = (json.loads((tmp_path / f"{worker}.json").read_text()) for worker in range(WORKERS))
    of_all = [[len(BATCHES), WORKERS, WORKERS * epoch] for epoch in range(EPOCHS)]
    lost = len(BATCHES) - 1  # of epoch 1
    assert one == other == [of_all[0], [lost, 2, 2], [len(BATCHES), 2, 4], *of_all[3:]]
    assert replacement == [[0, 1, 0], [0, 1, 1], [0, 1, 2], *of_all[3:]]
