"""What staleness does to a small convolutional network, and what a ramp makes good; one worker, late gradients.

    PACELINE_DATA=... python benchmarks/fidelity/staleness.py --write

Published, as shape (Chen et al., "Revisiting Distributed Synchronous SGD", 2016, arXiv:1604.00981): the test error on MNIST
grows with the staleness, and beyond some 15 updates training needs the staleness to grow over the first three epochs.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch

from paceline.algorithms.parameter_server import ParameterServer
from paceline.algorithms.server.adagrad import Adagrad
from paceline.algorithms.server.delay import ConstantDelay
from paceline.algorithms.server.modes import Async
from paceline.algorithms.server.update import UpdateInfo
from paceline.optim.flat import FlatBinding
from paceline.tasks import load_task

STALENESS = (0, 20, 50)
EPOCHS, RAMP_EPOCHS, BATCH_SIZE, LEARNING_RATE, SEEDS = 5, 3, 64, 0.01, 2
RULE = Adagrad()


def errors_by_epoch(staleness: int, ramp_epochs: float, seed: int) -> list[float]:
    """Test error after every epoch; 1 after the parameters became infinite."""
    task = load_task("mnist-cnn")
    train, test = task.load()
    inputs, targets = train.tensors
    torch.manual_seed(seed)
    model = task.model()
    flat = FlatBinding(model.parameters())
    x, gradient = torch.zeros(flat.num_elements), torch.zeros(flat.num_elements)
    flat.read(x)
    flat.bind(x)
    steps = len(inputs) // BATCH_SIZE
    delay = ConstantDelay(updates_late=staleness, ramp_updates=round(ramp_epochs * steps))
    injected = ParameterServer(mode=Async(), apply=RULE).delayed(delay)  # what --inject-staleness makes of it
    applier = injected.apply.start(flat.num_elements, x.dtype)
    errors, step = [], 0
    for epoch in range(EPOCHS):
        order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(1000 * seed + epoch))
        for batch in order[: steps * BATCH_SIZE].split(BATCH_SIZE):
            model.zero_grad()
            task.loss(model(inputs[batch]), targets[batch]).backward()
            flat.gather_gradients(gradient)
            info = UpdateInfo(
                worker_id=0, sequence=step, step=step, version_read=step, version=step, num_samples=BATCH_SIZE
            )
            applier.apply(x, gradient, info, LEARNING_RATE)
            step += 1
        accuracy = task.evaluate(model, test)["accuracy"] if bool(x.isfinite().all()) else 0.0
        assert accuracy is not None
        errors.append(1 - accuracy)
    return errors


def main() -> None:
    """Print the table and write it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true")
    write = parser.parse_args().write
    torch.set_num_threads(1)
    lines = [
        "# Injected staleness on mnist-cnn",
        "",
        "Printed by `python benchmarks/fidelity/staleness.py --write`.",
        "",
    ]
    lines += [
        f"One worker, batch {BATCH_SIZE}, Adagrad with learning rate {LEARNING_RATE:g}, every gradient applied so many"
        f" updates late; with the ramp, the delay grows from 0 over the first {RAMP_EPOCHS} epochs. Test error, %, mean of"
        f" {SEEDS} seeds.",
        "",
        "| staleness | ramp | "
        + " | ".join(f"epoch {epoch + 1}" for epoch in range(EPOCHS))
        + " | at the end, each seed |",
        "|---" * (EPOCHS + 3) + "|",
    ]
    print("\n".join(lines), flush=True)
    for staleness in STALENESS:
        for ramp in (0, RAMP_EPOCHS) if staleness else (0,):
            runs = [errors_by_epoch(staleness, ramp, seed) for seed in range(SEEDS)]
            means = [math.fsum(column) / SEEDS for column in zip(*runs, strict=True)]
            label = f"{RAMP_EPOCHS} epochs" if ramp else "none"
            lines.append(
                f"| {staleness} | {label} | "
                + " | ".join(f"{100 * mean:.2f}" for mean in means)
                + f" | {', '.join(f'{100 * run[-1]:.2f}' for run in runs)} |"
            )
            print(lines[-1], flush=True)
    if write:
        Path(__file__).with_suffix(".md").write_text("\n".join([*lines, ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
