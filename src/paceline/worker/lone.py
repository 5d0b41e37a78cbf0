"""A worker without a launcher: its loop stays plain PyTorch, without replaced parameters or hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import chain, repeat
from operator import attrgetter, length_hint
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import BatchSampler, IterableDataset

from paceline.data.plan import length_of
from paceline.data.wrappers import unwrapped_optimizer
from paceline.errors import UsageError
from paceline.loop.guards.hidden_hooks import leave_out_of_copies
from paceline.loop.own_batches import OwnBatches
from paceline.loop.schedules import FollowedScheduler
from paceline.optim.clipping import clip_grad_norm
from paceline.optim.several_optimizers import members_of
from paceline.worker.user_batches import Batches
from paceline.worker.worker import Worker

_VERSION = attrgetter("_version")  # PyTorch's count of a tensor's changes in place


class LoneWorker(Worker):
    """The only worker of its run, which ends with its loop.

    Costs: counting each batch's samples, and checking one parameter's version until the loop reads `progress`.
    """

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker._held, worker._optimizer, worker.algorithm, None)
        if (layout := getattr(worker, "layout", None)) is not None:
            self.layout = layout
        self._samples = _Samples(self._held, members_of(self._optimizer), self._undo)
        self._num_reports = 0

    def __enter__(self) -> LoneWorker:
        return self

    def __exit__(self, *of_error: object) -> bool:
        while self._undo:
            self._undo.pop()()
        return False

    def batches(self, loader: Iterable[Any], *, own: bool = False, device: torch.device | str | None = None) -> Batches:
        return Batches(loader, self._samples, self._samples.take_batches, device=device)

    def _note_loss(self, loss: float, samples: int | None) -> int:
        self._num_reports += 1
        if samples is not None:
            self._samples.tell(samples)
        return self._num_reports

    def accumulate(self) -> AbstractContextManager[None]:  # type: ignore[override]
        """Does nothing: no gradients are sent."""
        return nullcontext()

    def summary(self) -> dict[str, Any]:
        """Empty: no figures are recorded."""
        return {}

    def clip_grad_norm_(self, max_norm: float) -> float:
        return clip_grad_norm([p for p in self._held.parameters() if p.requires_grad], max_norm)

    @property
    def progress(self) -> int:
        return self._samples.in_steps()

    def follow(self, scheduler: Any, *, samples_per_step: int | None = None) -> Any:
        """As in `Worker`; without `samples_per_step` the scheduler steps with its optimizer."""
        optimizer = unwrapped_optimizer(getattr(scheduler, "optimizer", members_of(self._optimizer)[-1]))
        begun_at, num_steps = self._samples.in_steps() if samples_per_step is not None else 0, 0

        def position() -> float:
            return num_steps if samples_per_step is None else (self.progress - begun_at) / samples_per_step

        def after_step(*_: object) -> None:
            nonlocal num_steps
            num_steps += 1
            followed.advance()

        followed = FollowedScheduler(scheduler, position)
        self._undo.append(optimizer.register_step_post_hook(after_step).remove)
        return followed

    def _gathered(self, value: Any) -> list[Any]:
        return [value.detach() if isinstance(value, torch.Tensor) else value]


class _Samples:
    """Counts the samples of batches, and of steps.

    Recognizes steps by changed parameters until the loop asks for `progress`, and from then on by hooks. It looks at the
    optimizer's last parameter, and at all parameters only after a batch in which that one has not changed.
    """

    def __init__(self, model: nn.Module, optimizers: Iterable[Optimizer], undo: list[Callable[[], None]]) -> None:
        self._model, self._optimizers, self._undo = model, optimizers, undo  # which gets what removes the hooks
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._given = self._in_steps = 0  # samples of all batches so far, and of those in completed steps
        *_, self._watched = (p for one in optimizers for group in one.param_groups for p in group["params"])
        self._seen = self._watched._version
        self._num_changes: int | None = self._count_changes()  # None: not counted since the watched parameter changed
        self._is_hooked = False
        self._own: OwnBatches | None = None  # of a loop without `worker.batches`
        self._reported: int | None = None  # samples of its present step

    def epoch(self, loader: Iterable[Any], *, own: bool) -> Iterator[Any]:
        # Not a generator, which would make the loader's iterator only at its first batch.
        return map(self._hand_out, iter(loader), _sizes(loader))

    def _hand_out(self, batch: Any, size: int) -> Any:
        if not self._is_hooked:
            self._look_for_step()
        self._given += size or length_of(batch) or 1
        return batch

    def length(self, loader: Any, *, own: bool) -> int:
        return len(loader)

    def take_batches(self) -> None:
        """Stops counting by the model's calls: the loop uses `worker.batches` from now on."""
        if self._own is not None:
            self._own.close()
            self._own = None

    def _look_for_step(self) -> None:
        seen = self._watched._version
        if seen != self._seen:
            self._seen, self._num_changes, self._in_steps = seen, None, self._given
            return
        before, self._num_changes = self._num_changes, self._count_changes()
        if before not in (None, self._num_changes):
            self._in_steps = self._given

    def _count_changes(self) -> int:
        return sum(map(_VERSION, self._parameters))

    def tell(self, samples: int) -> None:
        if not self._is_hooked:
            self._look_for_step()
        if self._own is not None:
            self._reported = samples
        elif self._given > self._in_steps:
            self._given = self._in_steps + samples

    def in_steps(self) -> int:
        """Samples of all steps so far.

        Raises:
            UsageError: the loop fetches its own batches, and has made steps before it first asked.
        """
        if not self._is_hooked:
            before = self._seen, self._num_changes
            self._look_for_step()
            if not self._given:
                if (self._seen, self._num_changes) != before:
                    raise UsageError(
                        "This loop fetches its own batches and reads worker.progress only after its first step, so "
                        "samples were not counted: read it before the loop begins, or use worker.batches(loader)."
                    )
                self._own = own = OwnBatches(self._model, self._parameters, lambda: None)
                self._undo += [leave_out_of_copies(self._model), own.close]
            self._is_hooked = True
            self._undo += [one.register_step_post_hook(self._after_step).remove for one in self._optimizers]
        return self._in_steps

    def _after_step(self, *of_hook: object) -> None:
        if self._own is not None:
            self._given += self._own.samples if self._reported is None else self._reported
            self._reported = None
            self._own.begin_step()
        self._in_steps = self._given


def _sizes(loader: Any) -> Iterator[int]:
    """How many samples each batch has by the loader's sampler; 0: unknown."""
    sampler = getattr(loader, "batch_sampler", None)
    if type(sampler) is not BatchSampler or isinstance(getattr(loader, "dataset", None), IterableDataset):
        return repeat(0)
    num_samples, size = length_hint(sampler.sampler), sampler.batch_size
    return chain(repeat(size, num_samples // size), repeat(num_samples % size))
