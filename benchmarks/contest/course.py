"""What every system in the head to head does alike: model, data, a worker's compute, snapshots, and dying when told to.

A worker computes its small gradient and sleeps besides, which stands for a larger one: so four workers fit on two cores, and a
slow worker frees no core for the others. Every worker keeps a diary on disk, which outlives a `kill -9`: when each step ended,
and now and then its parameters. Those are evaluated afterwards, outside the clock.
"""

from __future__ import annotations

import json
import os
import signal
import struct
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.tasks.load import load_task

VARIABLE = "HEAD_TO_HEAD"  # a run's settings, for its workers
STEP = struct.Struct("dd")  # when a step ended, and how many samples it used
POLL_S = 0.005
SILENT_S = 300.0  # four processes that import PyTorch on a third of a busy machine took less than a minute


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One run.

    Args:
        method: name of the system and method, as in the tables.
        spec: what the program behind it is told, such as an algorithm's spec.
        scene: what happens to the last worker: nothing, `slow` or `killed`.
        learning_rate: of plain SGD.
        task: `mnist-mlp` or `digits-mlp`.
        folder: the run's own folder, for diaries and checkpoints.
        data: file with the data, as `save_data` writes it.
        workers: how many processes.
        batch_size: samples per worker and step.
        epochs: passes over the data, all workers together.
        step_s: seconds that the gradient of a batch of that size takes besides its computing.
        slow_factor: how many times that the last worker takes in the scene `slow`.
        snapshot_every_s: how often a worker writes its parameters down.
        seed: of the first parameters and the order of samples.
        silent_s: a run is ended if no worker has made a step for so long.
    """

    method: str
    spec: str
    scene: str
    learning_rate: float
    task: str
    folder: str
    data: str
    workers: int = 4
    batch_size: int = 64
    epochs: int = 3
    step_s: float = 0.01
    slow_factor: float = 10.0
    snapshot_every_s: float = 0.2
    seed: int = 0
    silent_s: float = SILENT_S

    @classmethod
    def here(cls) -> Settings:
        """Those of the run that this process is part of."""
        return cls(**json.loads(os.environ[VARIABLE]))

    def variables(self) -> dict[str, str]:
        """What tells a process."""
        return {VARIABLE: json.dumps(asdict(self))}

    @property
    def rounds_per_epoch(self) -> int:
        """Steps of each worker in an epoch if all make as many; batches that do not fill a round are left out."""
        return num_samples(self.task) // (self.batch_size * self.workers)

    @property
    def planned_samples(self) -> int:
        """Samples that all workers use together."""
        return self.epochs * self.rounds_per_epoch * self.workers * self.batch_size


def num_samples(task: str) -> int:
    """Training samples."""
    return {"mnist-mlp": 60_000, "digits-mlp": 1_437}[task]


def save_data(task: str, path: Path) -> None:
    """Writes the task's data to one file, which all processes map, so that none waits to read it."""
    if path.exists():
        return
    train, test = (one.tensors for one in load_task(task).load())  # type: ignore[attr-defined]
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}")
    torch.save({"train": list(train), "test": list(test)}, unfinished)
    unfinished.rename(path)


def load_data(path: str, part: str) -> list[Tensor]:
    """Inputs and labels of one part, `train` or `test`."""
    return torch.load(path, mmap=True)[part]


def make_model(settings: Settings) -> nn.Module:
    """The task's model; equal in all workers."""
    torch.set_num_threads(1)
    torch.manual_seed(settings.seed)
    return load_task(settings.task).model()


def make_optimizer(settings: Settings, model: nn.Module) -> torch.optim.SGD:
    """The same for all methods."""
    return torch.optim.SGD(model.parameters(), lr=settings.learning_rate)


def batches_of(settings: Settings, indices: list[int], data: list[Tensor], first: int = 0) -> Iterator[list[Tensor]]:
    """Full batches of these samples, one indexing operation each; from batch `first` on."""
    size = settings.batch_size
    chosen = torch.tensor(indices)
    for batch in range(first, min(len(chosen) // size, settings.rounds_per_epoch)):
        part = chosen[batch * size : (batch + 1) * size]
        yield [tensor[part] for tensor in data]


class Worker:
    """One worker on the course: computes gradients at its speed, and keeps a diary."""

    def __init__(self, settings: Settings, worker_id: int) -> None:
        self.settings, self.worker_id = settings, worker_id
        last = worker_id == settings.workers - 1
        self.step_s = settings.step_s * (settings.slow_factor if last and settings.scene == "slow" else 1.0)
        self.dies_at = settings.epochs * settings.rounds_per_epoch // 2 if last and settings.scene == "killed" else None
        self.folder = Path(settings.folder)
        self.num_steps, self.next_snapshot_s = 0, 0.0
        self.diary = -1

    def line_up(self) -> None:
        """Waits until all workers have come so far; the clock starts when they have. Who comes again does not wait."""
        lobby = self.folder / "lobby"
        lobby.mkdir(exist_ok=True)
        (lobby / str(self.worker_id)).touch()
        until_s = time.monotonic() + self.settings.silent_s
        while len(list(lobby.iterdir())) < self.settings.workers and time.monotonic() < until_s:
            time.sleep(POLL_S)
        path = self.folder / f"steps-{self.worker_id}-{os.getpid()}"
        self.diary = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(self.diary, STEP.pack(time.monotonic(), 0))

    def gradient(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """Forward and backward pass, with the sleep that makes them last, as long as the batch is large; the loss."""
        time.sleep(self.step_s * len(x) / self.settings.batch_size)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    def stepped(self, model: nn.Module, num_samples: int) -> None:
        """Writes down a step that was made, and dies if this was the one to die at."""
        now_s = time.monotonic()
        os.write(self.diary, STEP.pack(now_s, num_samples))
        if now_s >= self.next_snapshot_s:
            self.next_snapshot_s = now_s + self.settings.snapshot_every_s
            self.snapshot(model, now_s)
        self.num_steps += 1
        if self.num_steps == self.dies_at and not (mark := self.folder / "killed").exists():
            mark.write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)

    def snapshot(self, model: nn.Module, now_s: float) -> None:
        """The parameters as bytes, under the time."""
        with torch.no_grad():
            parameters = nn.utils.parameters_to_vector(model.parameters())
        (self.folder / f"at-{now_s:.4f}-{self.worker_id}").write_bytes(parameters.numpy().tobytes())

    def samples_of_all(self) -> int:
        """Samples that all workers have used so far, as their diaries say."""
        sizes = [path.stat().st_size for path in self.folder.glob("steps-*")]
        return sum(size // STEP.size - 1 for size in sizes) * self.settings.batch_size
