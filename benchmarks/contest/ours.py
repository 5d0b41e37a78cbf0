"""Paceline's methods on the course: `pl.launch` with four worker processes."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

from torch.utils.data import DataLoader, TensorDataset

import paceline as pl
from contest.course import Settings, Worker, load_data, make_model, make_optimizer
from paceline.algorithms import registry


def train(settings: Settings) -> None:
    """The loop of one worker."""
    model = make_model(settings)
    optimizer = make_optimizer(settings, model)
    whole_rounds = settings.planned_samples // settings.epochs
    data = [tensor[:whole_rounds] for tensor in load_data(settings.data, "train")]
    loader = DataLoader(TensorDataset(*data), batch_size=settings.batch_size, shuffle=True)
    with pl.attach(model, optimizer) as run:
        worker = Worker(settings, run.worker_id)
        worker.line_up()
        for _ in range(settings.epochs):
            for x, y in run.batches(loader):
                optimizer.zero_grad()
                worker.gradient(model, x, y)
                optimizer.step()
                worker.stepped(model, len(x))


def main() -> None:
    """Trains; where the method can neither go on without a worker nor replace it, goes on from the newest checkpoint."""
    settings = Settings.here()
    algorithm = registry.build(settings.spec)
    survives = "kill" in algorithm.tolerates or algorithm.survivors_continue
    folder = Path(settings.folder) / "run"
    launch = partial(
        pl.launch, partial(train, settings), workers=settings.workers, algorithm=algorithm, seed=settings.seed
    )
    if survives:
        run = launch(restarts=1)
    else:
        try:
            run = launch(out=folder, checkpoint_every_s=0.0)
        except pl.WorkerLostError:
            run = launch(resume=folder, checkpoint_every_s=0.0)
    dropped = run.result["dropped_updates"]
    (Path(settings.folder) / "said.json").write_text(json.dumps({"dropped_gradients": dropped}))


if __name__ == "__main__":
    main()
