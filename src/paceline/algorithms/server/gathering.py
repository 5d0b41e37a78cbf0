"""Gradients that a shard gathers before an update, possibly several of one worker, which continues meanwhile."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from paceline.algorithms.server.noise import NoiseMeter
from paceline.algorithms.server.update import UpdateInfo, WaitingGradient
from paceline.optim.half_types import sum_type
from paceline.optim.ranges import Ranges, numbered, ranges_of
from paceline.ports.shared import ServedParameters
from paceline.system.saved_state import check_fits

_PREFIX = "gathered."  # in a snapshot
_NOISE = f"{_PREFIX}noise"
_WHAT = "what servers have gathered"
_ABOUT = ("incarnation", "worker_id", "sequence", "step")  # of `_numbers`


class Gathering:
    """The gradients that a shard has accepted but not yet applied. In this base class every gradient is its own update."""

    def __init__(self, noise: NoiseMeter | None = None) -> None:
        self._noise = noise  # measures the gradients' noise, if the number of gradients follows it
        self.moves = noise.moves if noise is not None else 0.0  # vectors that the last `take` has read and written

    @property
    def takes_rows(self) -> bool:
        """Whether gradients may consist of rows; sums and measured noise need whole vectors."""
        return type(self) is Gathering and self._noise is None

    @property
    def chosen(self) -> int | None:
        """The current number of gradients if it is measured; else None."""
        return self._noise.gradients if self._noise is not None else None

    def join(self, worker_id: int) -> None:
        """A worker joins."""

    def leave(self, worker_id: int) -> WaitingGradient | None:
        """A worker leaves; its gradients still count. Returns the update that becomes due, if any."""

    def take(self, one: WaitingGradient) -> WaitingGradient | None:
        """Adds a gradient (P_s,); returns the update that becomes due, or None: its worker continues."""
        if self._noise is not None:
            self._noise.take(one.gradient)
        return one

    def state(self) -> dict[str, Tensor]:
        """A copied snapshot, saved beside a rule's state."""
        return {_NOISE: self._noise.state()} if self._noise is not None else {}

    def load(self, state: dict[str, Tensor], dtype: torch.dtype) -> None:
        """Restores a snapshot by copy, for gradients of `dtype`; gradients that another mode has gathered are lost."""
        if self._noise is not None and _NOISE in state:
            self._noise.load(state[_NOISE])


class _Sum:
    """sum_i (n_i / n_1) g_i (P_s,), n_i: samples of gradient i. Equal batches add up without extra rounding."""

    def __init__(self, first: WaitingGradient) -> None:
        self.x = first.gradient.to(sum_type(first.gradient.dtype), copy=True)
        self.dtype = first.gradient.dtype
        self.samples = self._unit = max(1, first.update.num_samples)
        self.gradients = 1
        self.missing: Ranges = first.update.missing

    def add(self, one: WaitingGradient) -> None:
        self.x.add_(one.gradient, alpha=one.update.num_samples / self._unit)
        self.samples += one.update.num_samples
        self.gradients += 1
        self.missing = _in_both(self.missing, one.update.missing)

    @property
    def weight(self) -> float:
        return self.samples / self._unit

    def mean(self) -> Tensor:
        """sum_i n_i g_i / sum_i n_i (P_s,); of one gradient, its own bits."""
        return self.x / self.weight

    def state(self, name: str, *about: int) -> dict[str, Tensor]:
        numbers = torch.tensor([[self.samples, self._unit, self.gradients, *about]])
        missing = numbered(self.missing, len(self.x))
        return {f"{name}.x": self.x.clone(), f"{name}.missing": missing, f"{name}.about": numbers}

    @classmethod
    def loaded(
        cls, state: dict[str, Tensor], name: str, dtype: torch.dtype, num_about: int = 0
    ) -> tuple[_Sum, list[int]]:
        """The inverse of `state`: the sum, and its `num_about` numbers."""
        x = state.get(f"{name}.x", torch.empty(0))
        like = {"x": x.view(-1).to(sum_type(dtype)), "missing": numbered((), x.numel()), "about": _row(3 + num_about)}
        check_fits({key: state.get(f"{name}.{key}") for key in like}, like, _WHAT)
        one = cls.__new__(cls)
        one.x, one.dtype = state[f"{name}.x"].to(sum_type(dtype), copy=True), dtype
        one.missing = ranges_of(state[f"{name}.missing"])
        one.samples, one._unit, one.gradients, *about = map(int, state[f"{name}.about"].flatten().tolist())
        return one, about


class Pool(Gathering):
    """One update of every B gradients, from any workers: Rennala SGD's batch.

    When the last worker leaves, the remaining gradients make the last update. Costs: one vector.

    Args:
        gradients: B, gradients per update; or a meter, whose current number is used.

    Reference: Tyurin and Richtárik, "Optimal Time Complexities of Parallel Stochastic Optimization Methods Under a Fixed
        Computation Model", NeurIPS 2023, arXiv:2305.12387.
    """

    def __init__(self, gradients: int | NoiseMeter, workers: Iterable[int]) -> None:
        super().__init__(gradients if isinstance(gradients, NoiseMeter) else None)
        self._gradients = gradients if isinstance(gradients, int) else 0
        self._members = set(workers)
        self._sum: _Sum | None = None
        self._last: WaitingGradient | None = None  # where the newest came from, without its vector

    def join(self, worker_id: int) -> None:
        self._members.add(worker_id)

    def leave(self, worker_id: int) -> WaitingGradient | None:
        self._members.discard(worker_id)
        return self._taken() if not self._members and self._sum is not None else None

    def take(self, one: WaitingGradient) -> WaitingGradient | None:
        super().take(one)
        self.moves = 3.0 + (self._noise.moves if self._noise is not None else 0.0)
        if self._sum is None:
            self._sum = _Sum(one)
        else:
            self._sum.add(one)
        self._last = one._replace(gradient=one.gradient[:0])
        return self._taken() if self._sum.gradients >= self._enough else None

    @property
    def _enough(self) -> int:
        return self._noise.gradients if self._noise is not None else self._gradients

    def _taken(self) -> WaitingGradient:
        gathered, last = self._sum, self._last
        assert gathered is not None
        assert last is not None
        self.moves += 2
        self._sum = None
        about = replace(last.update, num_samples=gathered.samples, missing=gathered.missing)
        return last._replace(update=about, gradient=gathered.mean().to(gathered.dtype))

    def state(self) -> dict[str, Tensor]:
        if self._sum is None or self._last is None:
            return super().state()
        return super().state() | self._sum.state(f"{_PREFIX}pool", *_numbers(self._last))

    def load(self, state: dict[str, Tensor], dtype: torch.dtype) -> None:
        super().load(state, dtype)
        if not any(name.startswith(f"{_PREFIX}pool.") for name in state):
            return
        self._sum, numbers = _Sum.loaded(state, f"{_PREFIX}pool", dtype, num_about=len(_ABOUT))
        self._last = _from_numbers(numbers)


class WorkerTable(Gathering):
    """A row per worker, the sum of its gradients; an update is the mean of the workers' means: Ringleader ASGD's table.

    A round has two phases. First every gradient goes into its worker's row, until all workers have one. Then each worker makes
    exactly one update, with its first gradient of this phase, added to its row before. Later gradients wait in a row of the
    next round. So the slowest worker's data count as much as the fastest one's, no gradient is lost, and none is more than
    2 n - 2 updates late.

    A worker that leaves keeps its row until its round ends. When the last one leaves, the gradients since the last update make
    one.
    Costs: up to two vectors per worker.

    Reference: Maranjyan and Richtárik, "Ringleader ASGD: The First Asynchronous SGD with Optimal Time Complexity under Data
        Heterogeneity", 2025, arXiv:2509.22860.
    """

    def __init__(self, workers: Iterable[int]) -> None:
        super().__init__()
        self._members = set(workers)
        self._rows: dict[int, _Sum] = {}
        self._next_rows: dict[int, _Sum] = {}
        self._stepped: set[int] | None = None  # workers that have made this round's update; None: the first phase
        self._unused: WaitingGradient | None = None  # the newest gradient, without its vector, if no update followed

    def join(self, worker_id: int) -> None:
        self._members.add(worker_id)

    def leave(self, worker_id: int) -> WaitingGradient | None:
        self._members.discard(worker_id)
        if self._members:
            self._end_round_if_over()
            return None
        if self._unused is None:
            return None
        update = self._update(self._unused, {**self._rows, **self._next_rows})
        self._rows, self._next_rows, self._stepped, self._unused = {}, {}, None, None  # a worker may rejoin
        return update

    def take(self, one: WaitingGradient) -> WaitingGradient | None:
        worker, own = one.update.worker_id, one._replace(gradient=one.gradient[:0])
        self.moves = 3.0
        if self._stepped is not None and worker in self._stepped:
            _add(self._next_rows, one)
            self._unused = own
            return None
        _add(self._rows, one)
        if self._stepped is None:
            if self._members - self._rows.keys():
                self._unused = own
                return None
            self._stepped = set()
        self._stepped.add(worker)
        update = self._update(own, self._rows)
        self._unused = None
        self._end_round_if_over()
        return update

    def _end_round_if_over(self) -> None:
        if self._stepped is not None and self._members <= self._stepped:
            self._rows, self._next_rows, self._stepped = self._next_rows, {}, None

    def _update(self, last: WaitingGradient, rows: dict[int, _Sum]) -> WaitingGradient:
        ordered = [rows[worker] for worker in sorted(rows)]
        self.moves += 2.0 * len(ordered) + 2
        mean = ordered[0].mean()
        missing = ordered[0].missing
        for row in ordered[1:]:
            mean.add_(row.x, alpha=1.0 / row.weight)
            missing = _in_both(missing, row.missing)
        mean.div_(len(ordered))
        about = replace(last.update, num_samples=sum(row.samples for row in ordered), missing=missing)
        return last._replace(update=about, gradient=mean.to(ordered[0].dtype))

    def state(self) -> dict[str, Tensor]:
        state: dict[str, Tensor] = {}
        for name, rows in (("row", self._rows), ("next", self._next_rows)):
            for worker, row in rows.items():
                state |= row.state(f"{_PREFIX}{name}.{worker}")
        if self._stepped is not None:
            state[f"{_PREFIX}stepped"] = torch.tensor([sorted(self._stepped)], dtype=torch.int64)
        if self._unused is not None:
            state[f"{_PREFIX}unused"] = torch.tensor([_numbers(self._unused)])
        return state

    def load(self, state: dict[str, Tensor], dtype: torch.dtype) -> None:
        for name, rows in (("row", self._rows), ("next", self._next_rows)):
            begin = f"{_PREFIX}{name}."
            for worker in {int(one.removeprefix(begin).split(".")[0]) for one in state if one.startswith(begin)}:
                rows[worker], _ = _Sum.loaded(state, f"{begin}{worker}", dtype)
        if f"{_PREFIX}stepped" in state:
            stepped = state[f"{_PREFIX}stepped"]
            check_fits(stepped, _row(stepped.numel()), _WHAT)
            self._stepped = set(stepped.flatten().tolist())
        if f"{_PREFIX}unused" in state:
            check_fits(state[f"{_PREFIX}unused"], _row(len(_ABOUT)), _WHAT)
            self._unused = _from_numbers(state[f"{_PREFIX}unused"].flatten().tolist())


def tell_choice(gathering: Gathering, shared: ServedParameters) -> None:
    """Records the chosen number for the run's result, if there is one."""
    if gathering.chosen is not None:
        shared.choose(gathering.chosen)


def without_gathered(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A rule's own part of a snapshot."""
    return {name: tensor for name, tensor in state.items() if not name.startswith(_PREFIX)}


def _add(rows: dict[int, _Sum], one: WaitingGradient) -> None:
    worker = one.update.worker_id
    if worker in rows:
        rows[worker].add(one)
    else:
        rows[worker] = _Sum(one)


def _row(length: int) -> Tensor:
    return torch.zeros(1, length, dtype=torch.int64)


def _numbers(one: WaitingGradient) -> list[int]:
    """A gradient's source, as a snapshot stores it."""
    return [one.incarnation, one.update.worker_id, one.update.sequence, one.update.step]


def _from_numbers(numbers: Iterable[int]) -> WaitingGradient:
    """The inverse of `_numbers`, without the vector."""
    incarnation, worker_id, sequence, step = numbers
    about = UpdateInfo(
        worker_id=worker_id, sequence=sequence, step=step, version_read=step, version=step, num_samples=1
    )
    return WaitingGradient(about, incarnation, torch.empty(0))


def _in_both(ones: Ranges, others: Ranges) -> Ranges:
    return tuple(own for own in ones if own in others)
