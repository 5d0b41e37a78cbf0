"""Loops whose loaders have processes of their own, for `launch`; each worker leaves a file of what it was given."""

import json
import multiprocessing
import os
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

import leftovers
import paceline as pl
from loops.coder import loss_of, made
from paceline.membership.environment import current_environment
from processes.programs import worker_id

SAMPLES, BATCH_SIZE = 64, 4
INPUTS = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(7))


class Numbered(Dataset):
    """A sample, its number, which process has fetched it, and what that draws by."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return INPUTS[index], index, os.getpid(), torch.initial_seed()


class Stream(IterableDataset):
    """The same without a length; each process of a loader has its part."""

    def __iter__(self):
        info = get_worker_info()
        begin, step = (0, 1) if info is None else (info.id, info.num_workers)
        for index in range(begin, SAMPLES, step):
            yield INPUTS[index], index, os.getpid(), torch.initial_seed()


class OtherForOne(Numbered):
    """Worker 1 has other samples than the others; which process fetches them makes no difference."""

    def __getitem__(self, index):
        return INPUTS[index] + worker_id(), index, 0, 0


def described(samples):
    x, indices, processes, seeds = zip(*samples, strict=True)
    return torch.stack(x), {"indices": indices, "process": processes[0], "seed": seeds[0]}


def fails_at_17(samples):
    if any(index == 17 for _, index, *_ in samples):
        raise KeyError("label 17")
    return described(samples)


@dataclass
class Loop:
    """Trains for some epochs.

    Args:
        folder: where worker i leaves i.json, and each process of its loader a file `loading-PID`.
        settings: of the loader.
        seed: of the loader's generator.
    """

    folder: Path
    settings: dict[str, Any] = field(default_factory=dict)
    epochs: int = 2
    seed: int | None = None
    dataset: type = Numbered

    def made_loader(self):
        settings = {"batch_size": BATCH_SIZE, "num_workers": 2, "collate_fn": lambda samples: described(samples)}
        if issubclass(self.dataset, Numbered):
            settings["shuffle"] = True
        if self.seed is not None:
            settings["generator"] = torch.Generator().manual_seed(self.seed)
        settings["worker_init_fn"] = lambda _: (self.folder / f"loading-{os.getpid()}").touch()
        return DataLoader(self.dataset(), **settings | self.settings)

    def __call__(self):
        model, optimizer = made()
        loader, told = self.made_loader(), {"process": os.getpid(), "epochs": []}
        with pl.attach(model, optimizer) as worker:
            self.before_epochs(worker)
            for _ in range(self.epochs):
                told["epochs"].append([])
                for number, (x, about) in enumerate(worker.batches(loader)):
                    told["epochs"][-1].append(about)
                    if self.leaves(number):
                        break
                    optimizer.zero_grad()
                    loss_of(model, x).backward()
                    optimizer.step()
                self.wait_for(loader.num_workers if loader.persistent_workers else 0)
        self.wait_for(0)
        (self.folder / f"{worker.worker_id}.json").write_text(json.dumps(told))

    def before_epochs(self, worker):
        """The place for what a worker waits for."""

    def wait_for(self, num_processes):
        """Until the loader has so many, or none where it may not have any."""
        environment = current_environment()
        if getattr(environment, "own_process", True):
            leftovers.wait_until(
                lambda: len(multiprocessing.active_children()) == num_processes, f"{num_processes} processes"
            )

    def leaves(self, number):
        """Whether to leave the epoch at its batch of this number; the place for what else shall happen then."""
        return False


class Breaks(Loop):
    """Leaves each epoch after two batches."""

    def leaves(self, number):
        return number == 2


@dataclass
class Late(Loop):
    """Worker 1 begins when worker 0 has had the whole first epoch."""

    dataset: type = OtherForOne

    def before_epochs(self, worker):
        if worker.worker_id == 1:
            leftovers.wait_until(lambda: (self.folder / "first-epoch").exists(), "the other worker's first epoch")

    def wait_for(self, num_processes):
        super().wait_for(num_processes)
        (self.folder / "first-epoch").touch()


class Paused(Loop):
    """Each worker goes on from its fourth batch when the run is being stopped, or has been before."""

    def leaves(self, number):
        if number == 3:
            leftovers.wait_until(lambda: (self.folder / "stopping").exists(), "the limit")
        return False


class Killed(Loop):
    """Worker 1 is killed at its third batch; worker 0 goes on only when the supervisor has noticed."""

    def leaves(self, number):
        if worker_id() == 1 and number == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if worker_id() == 0 and number == 1:
            leftovers.wait_until(lambda: (self.folder / "lost").exists(), "the other worker's end")
        return False


@dataclass
class Endless(Loop):
    """Until a signal comes; each worker leaves a file `training-PID` after some steps."""

    epochs: int = 100_000

    def wait_for(self, num_processes):
        """Not in each of the epochs that are left when the run is stopped."""

    def leaves(self, number):
        if number == 4:
            (self.folder / f"training-{os.getpid()}").touch()
        return False
