"""What all systems do alike on slow links: the model, its batches, its optimizer, and a diary of times and parameters."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from links.network import WIRE
from paceline.tasks.load import load_task

VARIABLE = "SLOW_NETWORK"  # a run's settings, for its workers
MOMENTUM = 0.9
POLL_S, LOBBY_S = 0.01, 120.0
SNAPSHOT_EVERY = 20  # steps


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One run.

    Args:
        program: whose loop runs: `paceline`, `ddp` or `torchft`.
        spec: what it is told, such as an algorithm's spec.
        learning_rate: of SGD with momentum, each worker's own where workers step by themselves.
        updates: steps of each worker.
        seed: of the first parameters and of the batches.
        folder: the run's own.
        workers: how many.
        batch_size: samples per worker and step.
        warm_up: steps at the beginning that a step's time and bytes leave out.
    """

    program: str
    spec: str
    learning_rate: float
    updates: int
    seed: int
    folder: str = ""
    workers: int = 4
    batch_size: int = 32
    warm_up: int = 4

    @classmethod
    def here(cls) -> Settings:
        """Those of the run that this process is part of."""
        return cls(**json.loads(os.environ[VARIABLE]))

    def variables(self) -> dict[str, str]:
        """What tells a process."""
        return {VARIABLE: json.dumps(asdict(self))}


def make_model(seed: int) -> nn.Sequential:
    """A network of 2,730,314 parameters on images of 32 x 32, most of them in one linear layer; equal in all workers."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 32, 5, stride=2, padding=2),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(64, 128, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2048, 1280),
        nn.ReLU(),
        nn.Linear(1280, 10),
    )


def sent_bytes() -> int:
    """What this process's machine has sent on its link so far, with headers and what was sent again."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    (line,) = [one for one in lines if one.lstrip().startswith(f"{WIRE}:")]
    return int(line.partition(":")[2].split()[8])


def load_data() -> list[list[Tensor]]:
    """CIFAR-10's images and labels, to train on and to test with."""
    return [list(part.tensors) for part in load_task("cifar10-cnn").load()]  # type: ignore[attr-defined]


class Course:
    """One worker's steps: its batches, and when each step ended."""

    def __init__(self, settings: Settings, worker_id: int) -> None:
        torch.set_num_threads(1)
        self.settings, self.worker_id = settings, worker_id
        self.folder = Path(settings.folder)
        self._data, _ = load_data()
        self._ended_s: list[float] = []
        self._sent: list[int] = []  # bytes, after the warm-up and at the end

    def line_up(self) -> None:
        """Waits until all workers have come so far; the clock starts when they have."""
        self.wait_for_all("here")
        self._ended_s.append(time.monotonic())

    def wait_for_all(self, place: str) -> None:
        """Waits until all workers have come to a place of this name."""
        (self.folder / f"{place}-{self.worker_id}").touch()
        until_s = time.monotonic() + LOBBY_S
        while len(list(self.folder.glob(f"{place}-*"))) < self.settings.workers:
            if time.monotonic() > until_s:
                raise TimeoutError(f"not all {self.settings.workers} workers came to '{place}' within {LOBBY_S:g} s")
            time.sleep(POLL_S)

    def train(self, model: nn.Module, optimizer: torch.optim.Optimizer, module: nn.Module) -> None:
        """All steps; `module` is the plain model inside `model`, whose parameters are written down."""
        for step in range(self.settings.updates):
            x, y = self._batch(step)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            self._ended_s.append(time.monotonic())
            if step + 1 in (self.settings.warm_up, self.settings.updates):
                self._sent.append(sent_bytes())
            if (step + 1) % SNAPSHOT_EVERY == 0:
                with torch.no_grad():
                    parameters = nn.utils.parameters_to_vector(module.parameters()).numpy()
                np.save(self.folder / f"at-{step + 1}-{self.worker_id}.npy", parameters)
        np.save(self.folder / f"ended-{self.worker_id}.npy", np.array(self._ended_s))
        np.save(self.folder / f"sent-{self.worker_id}.npy", np.array(self._sent))

    def _batch(self, step: int) -> list[Tensor]:
        """This worker's part of the step's batch, which is one of all samples with the same seed in all systems."""
        settings = self.settings
        generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + step)
        chosen = torch.randint(len(self._data[0]), (settings.workers * settings.batch_size,), generator=generator)
        own = chosen.view(settings.workers, -1)[self.worker_id]
        return [tensor[own] for tensor in self._data]
