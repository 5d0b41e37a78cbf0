"""A user's loop with everything that a case asks for, run on simulated workers, and the trace of what happened."""

import contextlib
import os
import pickle
import signal
import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from greenlet import getcurrent
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl
from oracles.events import Coded, Half, Step, Trace
from oracles.problem import FROZEN, PARTS, SHAPES, SIZE, START, X, Y, elements_with, rows_of, uses_branch
from paceline.algorithms.exchange import Exchanges
from paceline.algorithms.server.admission import WeightByTime
from paceline.compression.dq import AtBits
from paceline.compression.pieces import Pieces
from paceline.compression.registry import codec_registry
from paceline.optim.flat import FlatBinding
from paceline.records.summary import NO_UPDATE
from paceline.simulator.compute import Normal

OPTIMIZERS = {
    "sgd": lambda parameters, rate: torch.optim.SGD(parameters, lr=rate),
    "momentum": lambda parameters, rate: torch.optim.SGD(parameters, lr=rate, momentum=0.9),
    "nesterov": lambda parameters, rate: torch.optim.SGD(parameters, lr=rate, momentum=0.9, nesterov=True),
    "adamw": lambda parameters, rate: torch.optim.AdamW(parameters, lr=rate),
    "adagrad": lambda parameters, rate: torch.optim.Adagrad(parameters, lr=rate),
}


@dataclass(frozen=True)
class Case:
    """What meets in one run.

    Args:
        algorithm: a spec, its codec, rate rule and mode included.
        optimizer: one of `OPTIMIZERS`.
        workers: how many.
        samples: of the data set; a number that the round does not divide leaves uneven batches, or none for some workers.
        batch: samples of a batch.
        epochs: how often each sample is used.
        passes: backward passes before each step.
        marked: whether all passes but the last are in `worker.accumulate()`.
        clip: largest norm of a gradient; None: not clipped.
        scaler: whether the loop uses a GradScaler, whose scale doubles every two steps.
        overflow: worker and step at which the loss is infinite.
        slow: worker and factor on its time.
        kill: worker and step at which it dies.
        sparse: whether the branch is a table with sparse gradients.
        rate: the learning rate.
        seed: of the simulation.
    """

    algorithm: str
    optimizer: str = "sgd"
    workers: int = 2
    samples: int = 24
    batch: int = 4
    epochs: int = 2
    passes: int = 1
    marked: bool = False
    clip: float | None = None
    scaler: bool = False
    overflow: tuple[int, int] | None = None
    slow: tuple[int, float] | None = None
    kill: tuple[int, int] | None = None
    sparse: bool = False
    rate: float = 0.05
    seed: int = 0


class Model(nn.Module):
    """The problem's model, in float64."""

    def __init__(self, sparse=False):
        super().__init__()
        for (name, shape), part in zip(SHAPES.items(), PARTS, strict=True):
            self.register_parameter(name, nn.Parameter(torch.tensor(START[part]).view(shape)))
        self.table = nn.Embedding.from_pretrained(self.branch, sparse=True) if sparse else None
        if self.table is not None:
            self.table.weight = self.branch
        self.frozen = nn.Parameter(torch.tensor(FROZEN), requires_grad=False)
        self.register_buffer("x", torch.tensor(X))
        self.register_buffer("y", torch.tensor(Y))

    def forward(self, samples):
        x, error = self.x[samples], self.x[samples] @ self.weight.T + self.bias + self.frozen - self.y[samples]
        loss = error.square().sum(1).mean() / 2
        if uses_branch(samples.tolist()):
            rows = torch.tensor(rows_of(samples.tolist()))
            branch = self.branch[rows] if self.table is None else self.table(rows)
            loss = loss + (x @ branch.T).square().sum(1).mean() / 2
        return loss

    def vector(self):
        return np.concatenate([getattr(self, name).detach().numpy().ravel() for name in SHAPES]).copy()


class Log:
    """What all workers of a run have done, what their codecs were given, and their exchanges with each other."""

    def __init__(self):
        self.steps, self.coded, self.halves, self.models = {}, {}, {}, {}
        self.trips = []
        self._workers = {}  # greenlet -> worker

    def enter(self, worker):
        self._workers[getcurrent()] = worker
        self.steps[worker], self.coded[worker] = [], []
        self.halves.setdefault(worker, [])  # another worker may have asked for one already

    def worker(self):
        """The one whose loop, or program within it, is running; None: a server."""
        running = getcurrent()
        while running is not None and running not in self._workers:
            running = running.parent
        return self._workers.get(running)

    def trace(self, records, *, in_rounds):
        """What happened, by what the workers have noted and what the product has recorded.

        A step that a GradScaler leaves out is recorded only where others wait for it, `in_rounds`.
        """
        workers, steps = len(records), []
        for worker, rows in records.items():
            own = iter([one for one in self.steps[worker] if in_rounds or not one.overflows])
            for row in rows[np.argsort(rows["step"], kind="stable")]:
                step = next(own)
                step.read, step.ready = int(row["read_version"]), int(row["gradient_version"])
                step.applied = int(row["applied_version"])
                step.ready_s = float(row["gradient_ended_s"] + row["codec_s"])
                steps.append(step)
        sent, means = {worker: {} for worker in records}, {}
        ranges = FlatBinding([p for p in Model().parameters() if p.requires_grad]).ranges
        for worker, entries in self.coded.items():
            number, pieces, pushes = 0, [], {}
            last = max(
                (one.number for one in steps if one.worker == worker), default=0
            )  # a later one was begun, not made
            for carrier, step, length, coded in entries:
                if carrier == "push":
                    pushes.setdefault(min(step, last), []).append(coded)  # of each shard
                elif carrier == "mean":
                    means.setdefault(number, (length, {}))[1][worker] = coded
                    number += 1
                else:
                    pieces.append(coded)
                    if len(pieces) == workers:
                        sent[worker][number] = _put_together(pieces, ranges, length)
                        pieces = []
            sent[worker] |= {step: _put_together(parts, ranges, SIZE) for step, parts in pushes.items()}
        means = [_put_together([parts[w] for w in sorted(parts)], ranges, n) for _, (n, parts) in sorted(means.items())]
        detection_s = pl.Cluster(workers=1).detection_s
        left_s = {
            worker: float(rows["ended_s"].max(initial=0.0)) + detection_s * (worker not in self.models)
            for worker, rows in records.items()
        }
        halves = {
            worker: [Half(peer, *(_cut(one, ranges) for one in pair)) for peer, *pair in own]
            for worker, own in self.halves.items()
        }
        return Trace(workers, steps, self.models, sent, means, left_s, halves, self.trips)

    @contextlib.contextmanager
    def listening(self):
        """Notes what codecs code, what exchanges are of, and how long servers think that workers take."""
        depth, kinds = [0], [AtBits, *(kind for _, kind in codec_registry.items() if "encode" in vars(kind))]

        def noting(original):
            def encode(codec, gradient, memory, key=0):
                worker, is_probe = self.worker(), not gradient.numel()
                given = gradient.double() + (memory.double() if memory is not None else 0.0)
                depth[0] += 1
                try:
                    encoded = original(codec, gradient, memory, key)
                finally:
                    depth[0] -= 1
                if not depth[0] and worker is not None and not is_probe:
                    decoded = codec.decode(encoded, len(gradient), gradient.dtype)
                    (carrier, length), at = _carrier(), len(self.steps[worker])
                    note = Coded(given.numpy().copy(), decoded.double().numpy().copy())
                    self.coded[worker].append((carrier, at, length, note))
                return encoded

            return encode

        def move(exchanges, peer, there, at, here, of):
            self.halves.setdefault(exchanges._me, []).append((peer, there.numpy().copy(), here.numpy().copy()))
            originals[Exchanges, "_move"](exchanges, peer, there, at, here, of)

        def timed(admission, worker, seconds):
            self.trips.append((worker, seconds))
            originals[WeightByTime, "timed"](admission, worker, seconds)

        def leave(admission, worker):
            self.trips.append((worker, None))
            originals[WeightByTime, "leave"](admission, worker)

        noted = {(Exchanges, "_move"): move, (WeightByTime, "timed"): timed, (WeightByTime, "leave"): leave}
        originals = {
            (kind, name): getattr(kind, name) for kind, name in [*((kind, "encode") for kind in kinds), *noted]
        }
        noted |= {(kind, "encode"): noting(originals[kind, "encode"]) for kind in kinds}
        for (kind, name), function in noted.items():
            setattr(kind, name, function)
        try:
            yield
        finally:
            for (kind, name), original in originals.items():
                setattr(kind, name, original)


def _carrier():
    """What is coded, a push, a piece of a worker's vector or one of the mean, and of a vector of how many elements."""
    frame = sys._getframe(2)
    coder = frame.f_locals["self"]
    if not isinstance(coder, Pieces):
        return "push", SIZE
    return "mean" if frame.f_code.co_name == Pieces._own_piece.__name__ else "piece", coder._length


def _cut(vector, ranges):
    """A flat vector without what lies between parameters."""
    return np.concatenate([vector[begin:end] for begin, end in ranges])


def _put_together(parts, ranges, length):
    """Pieces of a flat vector, as the oracles have it: without what lies between parameters.

    Or of some parameters, which their number of elements tells, with zeros for the others.
    """
    given, decoded = (np.concatenate([getattr(part, name) for part in parts]) for name in Coded._fields)
    if length >= SIZE:
        return Coded(_cut(given, ranges), _cut(decoded, ranges))
    has = next(has for has in product([False, True], repeat=len(ranges)) if elements_with(has).sum() == length)
    found = Coded(np.zeros(SIZE), np.zeros(SIZE))
    for there, here in zip(found, (given, decoded), strict=True):
        there[elements_with(has)] = here[:length]
    return found


@dataclass(frozen=True)
class Loop:
    """The function that each worker runs.

    Args:
        case: what it does.
        log: of all workers, where they are simulated.
        folder: where each leaves its own log, where they are processes.
    """

    case: Case
    log: Log | None = None
    folder: Path | None = None

    def __call__(self):
        log = self.log or Log()
        if self.folder is None:
            self._train(log)
            return
        with log.listening():
            self._train(log)

    def _train(self, log):
        case, model = self.case, Model(self.case.sparse)
        optimizer = OPTIMIZERS[case.optimizer]([p for p in model.parameters() if p.requires_grad], case.rate)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2) if case.scaler else None
        loader = DataLoader(TensorDataset(torch.arange(case.samples)), batch_size=case.batch, shuffle=True)
        num_batches = -(-case.samples // case.batch)
        with pl.attach(model, optimizer) as worker:
            me = worker.worker_id
            log.enter(me)
            optimizer.register_step_pre_hook(lambda *_: setattr(log.steps[me][-1], "before", model.vector()))
            done = 0
            for _ in range(case.epochs):
                for number, (samples,) in enumerate(worker.batches(loader)):
                    if not done:
                        log.steps[me].append(Step(me, len(log.steps[me]) + 1))
                        self._save(log, me)
                        self._die(me, len(log.steps[me]))
                    done += 1
                    step = log.steps[me][-1]
                    if worker.algorithm.lockstep and number * case.workers + me >= num_batches:
                        step.again.add(len(step.passes))
                    self._pass(worker, step, model, scaler, samples, is_last=done == case.passes)
                    if done == case.passes:
                        _step(worker, optimizer, scaler, case.clip)
                        done = 0
        log.models[me] = model.vector()
        self._save(log, me)

    def _pass(self, worker, step, model, scaler, samples, *, is_last):
        step.at.append(model.vector())
        loss = model(samples)
        if (step.worker, step.number) == self.case.overflow:
            step.overflows, loss = True, loss * float("inf")
        with worker.accumulate() if self.case.marked and not is_last else contextlib.nullcontext():
            (loss if scaler is None else scaler.scale(loss)).backward()
        step.passes.append(samples.tolist())

    def _die(self, worker, step):
        if self.folder is not None and (worker, step) == self.case.kill:
            os.kill(os.getpid(), signal.SIGKILL)

    def _save(self, log, worker):
        if self.folder is not None:
            kept = {name: getattr(log, name) for name in ("steps", "coded", "halves", "models")}
            file = self.folder / f"{worker}.pickle"
            file.with_suffix(".new").write_bytes(pickle.dumps(kept))
            file.with_suffix(".new").replace(file)


def _step(worker, optimizer, scaler, clip):
    if clip is not None:
        if scaler is not None:
            scaler.unscale_(optimizer)
        worker.clip_grad_norm_(clip)
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
    optimizer.zero_grad()


class Refused(NamedTuple):
    """A combination was refused, and why."""

    sentence: str


class Lost(NamedTuple):
    """The run ended as a worker died, and what it said."""

    sentence: str


class Untrained(NamedTuple):
    """No update was made of so few gradients."""

    gradients: int


def simulated(case):
    """What a case's simulated run comes to: a trace, or that it was refused before its first step, or lost with a worker."""
    log = Log()
    # No two workers are ever ready at the same instant: the order of events follows from their times.
    times = Normal(average_s=0.01, deviation_s=0.001)
    cluster, faults = pl.Cluster(workers=case.workers, compute_s=times), pl.Faults()
    if case.slow is not None:
        cluster = cluster.slow(worker=case.slow[0], factor=case.slow[1])
    if case.kill is not None:
        faults = faults.kill(worker=case.kill[0], step=case.kill[1])

    def run(algorithm):
        with log.listening():
            return pl.simulate(Loop(case, log), cluster=cluster, faults=faults, algorithm=algorithm, seed=case.seed)

    return _outcome(case, log, run)


def launched(case, folder):
    """The same of a run on real processes, whose workers leave their logs in a folder."""
    log = Log()

    def run(algorithm):
        slow = None if case.slow is None else dict([case.slow])
        try:
            return pl.launch(
                Loop(case, folder=folder), workers=case.workers, algorithm=algorithm, seed=case.seed, slow=slow
            )
        finally:
            for file in folder.glob("*.pickle"):
                for name, own in pickle.loads(file.read_bytes()).items():
                    getattr(log, name).update(own)

    return _outcome(case, log, run)


def _outcome(case, log, run):
    try:
        algorithm = pl.parse(case.algorithm)
        found = run(algorithm)
    except (pl.UsageError, pl.WorkerLostError) as error:
        ended = error
    except pl.PacelineError as error:
        if str(error) != NO_UPDATE:
            raise
        return Untrained(sum(not step.overflows for steps in log.steps.values() for step in steps))
    else:
        return log.trace(found.records, in_rounds=algorithm.lockstep)
    if isinstance(ended, pl.UsageError):
        is_first = case.sparse or all(len(steps) <= 1 for steps in log.steps.values())  # sparse ones may come later
        assert is_first, f"refused after the first step: {ended}"
        return Refused(str(ended))
    assert case.kill is not None, ended
    assert "kill" not in algorithm.tolerates, ended
    return Lost(str(ended))
