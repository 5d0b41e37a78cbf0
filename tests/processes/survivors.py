"""A loop in which workers are killed, and the same training in one process: a slow reference."""

import json
import os
import signal
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import exact_codec
import paceline as pl
import paceline.worker.memberships.memory
from paceline.memory.atomics import load
from paceline.memory.newcomers import _ASKS, _EPOCH, _LET_IN
from paceline.ports.round_shares import RoundShares
from paceline.records import checkpoint_files
from paceline.worker.memberships.elastic import ElasticMembership

BATCH_SIZE, EPOCHS, BUCKETS = 4, 2, 16
# The replacement is accepted in an epoch's last step, so that its loop is still in that epoch when it is let in.
LET_IN_NEXT_EPOCH = {"num_batches": 9, "newcomers": {3: {1: 1}}, "sums": "epoch", "epochs": 3}


OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.02),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
}


def model(kind="plain"):
    torch.manual_seed(0)
    first = Buckets(3 * BUCKETS, 5, sparse=True) if kind == "sparse" else nn.Linear(3, 5)
    middle = nn.BatchNorm1d(5) if kind == "normalized" else nn.Tanh()
    last = Taught(5, 1) if kind == "taught" else nn.Linear(5, 1)
    return nn.Sequential(first, middle, last).double()


class Taught(nn.Linear):
    """Has a frozen moving average of its weight."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.teacher = nn.Parameter(self.weight.detach().clone(), requires_grad=False)

    @torch.no_grad()
    def teach(self):
        self.teacher.lerp_(self.weight, 0.25)


class Buckets(nn.Embedding):
    """Looks up the bucket of each of three features, and adds up what it finds."""

    def forward(self, x):
        number = ((x.clamp(-2, 1.9) + 2) * BUCKETS / 4).long()
        return super().forward(number + BUCKETS * torch.arange(3)).sum(1)


def samples(num_batches):
    """Of which the last batch lacks one."""
    draw = torch.Generator().manual_seed(1)
    numbers = torch.arange(num_batches * BATCH_SIZE - 1)
    x = torch.randn(len(numbers), 3, generator=draw, dtype=torch.float64)
    return numbers, x, x.sum(1, keepdim=True).sin()


class Stream(IterableDataset):
    def __init__(self, num_batches):
        self.samples = samples(num_batches)

    def __iter__(self):
        return zip(*self.samples, strict=True)


class Reversed(torch.utils.data.Sampler):
    def __init__(self, dataset):
        self.dataset = dataset

    def __iter__(self):
        return iter(reversed(range(len(self.dataset))))

    def __len__(self):
        return len(self.dataset)


def loader(kind, num_batches):
    dataset: Dataset = TensorDataset(*samples(num_batches))
    match kind:
        case "plain":
            return DataLoader(dataset, BATCH_SIZE, shuffle=True)
        case "processes":
            return DataLoader(dataset, BATCH_SIZE, shuffle=True, num_workers=2)
        case "drawn":
            return DataLoader(dataset, BATCH_SIZE, sampler=Reversed(dataset))
        case "stream":
            return DataLoader(Stream(num_batches), BATCH_SIZE)
        case "list":
            return list(DataLoader(dataset, BATCH_SIZE))
    raise ValueError(kind)


class OneAhead:
    """A worker's batches, of which the next one is fetched before the loop gets one."""

    def __init__(self, worker, data):
        self.begins = worker._defer_steps()
        self.batches = worker.batches(data)

    def __iter__(self):
        source = iter(self.batches)
        batch = next(source, None)
        while batch is not None:
            following = next(source, None)
            self.begins.popleft()[1]()
            yield batch
            batch = following


def wait_for_newcomer(worker, of, incarnation):
    """Waits until a replacement asks to be let in, in shared memory in the present epoch, or has been let in or refused."""
    if isinstance(worker._membership, ElasticMembership):
        collectives = worker._membership._collectives
        while not collectives.incarnation(of) >= incarnation:
            ask = collectives.requests.get(of)
            if ask is not None and ask.incarnation >= incarnation and {*collectives.members} - {of} <= ask.peers:
                return
            collectives._hear()
        return
    newcomers, deal = worker._membership.arena.newcomers, worker._replica.deal
    while load(newcomers._at(of, _LET_IN)) < incarnation:
        asks, epoch = load(newcomers._at(of, _ASKS)), load(newcomers._at(of, _EPOCH))
        if asks < 0 or (asks // 2 >= incarnation and epoch in (-1, deal.epoch)):
            return
        time.sleep(1e-3)


def head(net, x):
    """The model's output, of which only the last layer gets a gradient."""
    return net[-1](net[:-1](x).detach())


def own_samples(batches):
    """Those of batches that the worker did not have again."""
    return [n for batch, is_own in batches if is_own for n in batch]


@dataclass(frozen=True)
class Survivors:
    """The loop: writes each step's samples to a file of its worker, and kills this process where it is told to.

    Args:
        folder: of the files.
        kills: by worker, its number of batches before the one at which it is killed; or several, for each of its processes.
        fails: the same, for an error that ends the run.
        saved: a run's folder: a worker fails only when a checkpoint there has two epochs, and then whatever its batch.
        at: of that batch: before its `forward`, in `backward`, or after `step`.
        newcomers: by number of batches, the workers for whose replacements the loop waits before it, each with how many of
            its processes there were before.
        schedule: whether the learning rate falls by "epoch", by "step", or by a step that may "follow" the run, or
            on a "plateau", or by the loop's "own" count.
        sums: whether the loop calls `worker.mean` and `worker.sum` in every step, or after each "epoch".
        twice: whether the loop makes a second step with each batch, in which the first layer has no gradient.
        ahead: whether the loop fetches one batch ahead, as Lightning does.
        slow_s: how much longer a sample seems to take worker 0, beyond the others' 1 ms.
        copies: of the stand-in for a GPU that has the models; None: the CPU has them.
    """

    folder: Path
    kills: dict = field(default_factory=dict)
    algorithm: str = "all-reduce"
    optimizer: str = "sgd"
    fails: dict = field(default_factory=dict)
    saved: Path | None = None
    at: str = "forward"
    clips: bool = False
    per_step: int = 1
    marks: bool = False
    data: str = "plain"
    net: str = "plain"
    sums: bool | str = False
    scales: bool = False
    ahead: bool = False
    twice: bool = False
    newcomers: dict = field(default_factory=dict)
    schedule: str = ""
    num_batches: int = 10
    epochs: int = EPOCHS
    slow_s: float = 0.0
    copies: Any = None

    def __call__(self):
        if self.copies is not None:
            copies = self.copies()
            paceline.worker.memberships.memory.device_copies = lambda _: copies
        exact_codec.learn()
        net, data = model(self.net), loader(self.data, self.num_batches)
        optimizer = OPTIMIZERS[self.optimizer](net.parameters())
        if self.data == "stream":
            torch.manual_seed(2)
        number, step = 0, []
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=self.scales)
        with pl.attach(net, optimizer, algorithm=self.algorithm) as worker:
            if self.slow_s:
                time_s = 1e-3 + self.slow_s * (worker.worker_id == 0)
                RoundShares.time_per_sample_s = lambda _: time_s
            if self.at == "backward":
                net[0].weight.register_hook(lambda g: self._die(worker, "backward", number) or g)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1 if self.schedule == "epoch" else 7, 0.7)
            if self.schedule == "plateau":
                scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.7, patience=3)
            if self.schedule == "follow":
                scheduler = worker.follow(scheduler)
            batches = OneAhead(worker, data) if self.ahead else worker.batches(data)
            for _ in range(self.epochs):
                for indices, x, y in batches:
                    if not worker._membership.incarnation:
                        for of, process in self.newcomers.get(number, {}).items():
                            if of != worker.worker_id:
                                wait_for_newcomer(worker, of, process)
                    self._die(worker, "forward", number)
                    last = len(step) == self.per_step - 1
                    if self.sums is True:
                        worker.mean(float(number))
                    if not step:
                        optimizer.zero_grad()
                    if self.marks and not last:
                        with worker.accumulate():
                            nn.functional.mse_loss(net(x), y).backward()
                    else:
                        scaler.scale(nn.functional.mse_loss(net(x), y)).backward()
                    step.append([indices.tolist(), worker._replica.batches_of_step[-1] >= 0])
                    if last:
                        if self.clips:
                            scaler.unscale_(optimizer)
                            worker.clip_grad_norm_(0.05)
                        if self.schedule == "own":
                            optimizer.param_groups[0]["lr"] = 0.05 / (1 + number)
                        self._log(worker, step)
                        scaler.step(optimizer)
                        scaler.update()
                        if self.net == "taught":
                            net[-1].teach()
                        if self.schedule in ("step", "follow"):
                            scheduler.step()
                        if self.schedule == "plateau":
                            scheduler.step(worker.mean(1.0))
                        self._die(worker, "step", number)
                        if self.twice:
                            optimizer.zero_grad()
                            nn.functional.mse_loss(head(net, x), y).backward()
                            optimizer.step()
                            self._log(worker, step)
                        step = []
                    if self.sums is True:
                        assert worker.sum(1) <= worker.num_workers
                    number += 1
                if self.sums == "epoch":
                    assert worker.sum(1) <= worker.num_workers
                if self.schedule == "epoch":
                    scheduler.step()
        torch.save(net.state_dict(), self.folder / f"model-{worker.worker_id}.pt")

    def _die(self, worker, at, number):
        kills, incarnation = self.kills.get(worker.worker_id), worker._membership.incarnation
        kills = kills if isinstance(kills, list) else [kills]
        if at == self.at and kills[incarnation : incarnation + 1] == [number]:
            os.kill(os.getpid(), signal.SIGKILL)
        if at == self.at and worker.worker_id in self.fails and self._fails(self.fails[worker.worker_id], number):
            raise KeyError("label 17")

    def _fails(self, first, number):
        if self.saved is None:
            return number == first
        newest = checkpoint_files.newest_or_none(self.saved / "checkpoint")
        return number >= first and newest is not None and int(newest.name) >= 2 * self.num_batches

    def _log(self, worker, step):
        if worker._membership.incarnation and worker._membership.incarnation not in self.entered(worker.worker_id):
            with (self.folder / f"entered-{worker.worker_id}.jsonl").open("a") as file:
                file.write(json.dumps([worker._membership.incarnation, worker._replica.step]) + "\n")
        with (self.folder / f"steps-{worker.worker_id}.jsonl").open("a") as file:
            file.write(json.dumps([worker._replica.step, [worker._optimizer.param_groups[0]["lr"], step]]) + "\n")

    def entered(self, worker):
        """By incarnation of a worker's replacements: the first step of each."""
        path = self.folder / f"entered-{worker}.jsonl"
        return dict(map(json.loads, path.read_text().splitlines())) if path.exists() else {}

    # The reference

    def counted(self, records):
        """By version: what each worker contributed, as lists of samples per batch; a worker without a batch has none.

        A record waits for the loss of its step: a worker that is killed before has logged the step, which counts.
        """
        found = defaultdict(list)
        for worker, rows in sorted(records.items()):
            path = self.folder / f"steps-{worker}.jsonl"
            steps = dict(map(json.loads, path.read_text().splitlines())) if path.exists() else {}
            for row in rows:
                step = steps.pop(int(row["step"]), None)
                if row["applied_version"] > 0 and row["samples"]:
                    found[int(row["applied_version"])].append(step)
            for number, step in steps.items():
                found[number].append(step)
        return dict(sorted(found.items()))

    def replayed(self, counted):
        """Trains in one process on what the workers contributed, each update on the mean over all of its samples.

        All workers have the same learning rate.
        """
        net = model(self.net)
        optimizer = OPTIMIZERS[self.optimizer](net.parameters())
        _, x, y = samples(self.num_batches)
        passes = (
            [range(self.per_step)]
            if self.marks or self.algorithm.startswith("lockstep")
            else [[n] for n in range(self.per_step)]
        )
        for version, told in counted.items():
            forward = head if self.twice and version % 2 == 0 else nn.Module.__call__
            rates, parts = zip(*told, strict=True)
            (optimizer.param_groups[0]["lr"],) = set(rates)
            means = [self._mean(net, forward, [[part[n] for n in one] for part in parts], x, y) for one in passes]
            optimizer.zero_grad()
            for parameter, *gradients in zip(net.parameters(), *means, strict=True):
                parameter.grad = sum(gradients) if gradients[0] is not None else None
            if self.clips and not self.algorithm.startswith("lockstep"):
                nn.utils.clip_grad_norm_(net.parameters(), 0.05)
            optimizer.step()
            if self.net == "taught":
                net[-1].teach()
        return net.state_dict()

    def _mean(self, net, forward, parts, x, y):
        """The mean of what the workers' batches add up to, weighted by their own samples.

        A worker without a batch has an earlier one again: beside another one it adds to the gradient, and not to the weight.
        """
        total = [torch.zeros_like(one) for one in net.parameters()]
        num_samples = 0
        for batches in parts:
            net.zero_grad()
            for batch, _ in batches:
                nn.functional.mse_loss(forward(net, x[batch]), y[batch]).backward()
            for parameter in net.parameters():
                parameter.grad = parameter.grad.to_dense() if parameter.grad is not None else None
            if self.clips and self.algorithm.startswith("lockstep"):
                nn.utils.clip_grad_norm_(net.parameters(), 0.05)
            own = len(own_samples(batches))
            num_samples += own
            for sum_, parameter in zip(total, net.parameters(), strict=True):
                sum_ += own * parameter.grad if own and parameter.grad is not None else 0
        has_gradient = [parameter.grad is not None for parameter in net.parameters()]
        return [one / num_samples if has else None for one, has in zip(total, has_gradient, strict=True)]

    def models(self, workers):
        return [torch.load(self.folder / f"model-{worker}.pt") for worker in workers]
