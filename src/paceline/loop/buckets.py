"""A flat gradient cut into buckets, each handed out once backward has completed it."""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from paceline.errors import UsageError
from paceline.optim.flat import TAKES_DENSE, FlatBinding
from paceline.optim.ranges import Ranges
from paceline.ports.shared import BUCKET_BYTES
from paceline.system.torch_internals import foreach_copy

# Workers beyond which a ring's pieces would be smaller than 64 KiB, which at 10 Gbit/s take 50 us, as long as the latency.
# Simulated, 100 MB with 200 ms of computing: 64 workers take 480 ms a step with buckets of 1 MiB, 262 with these, 292
# with 25 MB; 128 take 789, 276, 294. With a latency of 10 us 64 take 256, 261, 292.
_GROWS_FROM = 16


class PendingGradients(Protocol):
    """Gradients that other workers' contributions complete after backward has added to them."""

    completed: list[Callable[[nn.Parameter], None]]  # called with a parameter once its gradient is complete

    def is_pending(self, parameter: nn.Parameter) -> bool:
        """Whether this parameter's gradient is one of them."""
        ...

    def finish(self) -> None:
        """Completes all gradients that the present backward pass has added to; complete ones stay unchanged."""


def bucket_bytes_for(num_workers: int, least_bytes: int = BUCKET_BYTES) -> int:
    """Bucket size for `num_workers` workers: latency must not dominate a ring's pieces, which are n-ths of a bucket.

    >>> bucket_bytes_for(2), bucket_bytes_for(64)
    (1048576, 4194304)
    """
    return max(least_bytes, least_bytes * num_workers // _GROWS_FROM)


def bucket_ranges(binding: FlatBinding, bucket_bytes: int = BUCKET_BYTES) -> list[tuple[int, int]]:
    """Where the buckets of a flat gradient begin and end, the last parameters' first: what backward completes first.

    Buckets are contiguous and end where a parameter ends, once they have reached `bucket_bytes`. The last one has the padding
    in front. One begins where the shards do, so that none mixes shards and parameters that all workers have.
    """
    ranges, end = [], binding.num_elements
    for index, offset in reversed(list(enumerate(binding.offsets))):
        is_first_cut = offset == binding.cut_from
        begin = offset if index or is_first_cut else 0
        if (end - begin) * binding.dtype.itemsize >= bucket_bytes or not index or is_first_cut:
            ranges.append((begin, end))
            end = begin
    if end:
        ranges.append((0, end))  # all parameters are shards: the padding is a bucket of its own
    return ranges


class GradientBuckets:
    """Watches the parameters' gradients during backward and hands out buckets of `g` (P,) in a fixed order.

    The buckets are those of `bucket_ranges`. One is copied into `g` and handed out once it and all before it are complete, so
    that every worker hands them out in the same order, independent of its backward pass.

    Args:
        g: the flat vector (P,); its padding is zero. None: gradients stay in the parameters, and there are no buckets.
        on_gradient: a method, called with a parameter's index when backward has added to its gradient. It runs after all hooks
            of the loop; in the first pass after the loop has registered one, only `complete_all` hands out that parameter.
        bucket_bytes: as for `bucket_ranges`.
    """

    def __init__(
        self,
        binding: FlatBinding,
        g: torch.Tensor | None,
        on_gradient: Callable[[int], None],
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._parameters = binding.parameters
        self._views = binding.views(g) if g is not None else []
        ranges = bucket_ranges(binding, bucket_bytes) if g is not None else []
        self.vectors = [g[begin:end] for begin, end in ranges] if g is not None else []
        starts = [begin for begin, _ in ranges]  # descending
        self._bucket_of = [bisect_left(starts, -offset, key=lambda begin: -begin) for offset in binding.offsets]
        self._members: list[list[int]] = [[] for _ in ranges]
        for index in reversed(range(len(self._views))):
            self._members[self._bucket_of[index]].append(index)
        self._awaited: list[set[int]] = []
        self._ranges = binding.ranges
        self._without: list[int] = []  # by index, of what was handed out
        self._num_out = len(self.vectors)
        self._ready: Callable[[torch.Tensor], None] = _nobody
        # PyTorch holds hooks where the garbage collector cannot see them: a strong reference to what owns the parameters would
        # keep all of it for good.
        self._tell = partial(_tell, weakref.WeakMethod(on_gradient))
        self._hooks: list[Any] = list(map(self._hooked, range(len(self._parameters))))
        self._has_followers = False  # the loop has registered hooks that run after these

    @property
    def missing(self) -> Ranges:
        """The parameters without a gradient, of those in the buckets that have been handed out since `begin`."""
        return tuple(self._ranges[index] for index in sorted(self._without))

    def begin(self, ready: Callable[[torch.Tensor], None], *, at_end: bool = False) -> None:
        """Begins a backward pass, whose buckets go to `ready`; `at_end`: all of them at its end.

        Raises:
            UsageError: the last pass raised an error after some of its buckets were handed out.
        """
        if 0 < self._num_out < len(self.vectors):
            raise UsageError(
                "A backward pass raised an error after some of its gradients were sent, and the loop runs another: put"
                " `with worker.accumulate():` around passes that may fail, or use lockstep."
            )
        self._ready = ready
        self._awaited = [] if at_end else list(map(set, self._members))
        self._without.clear()
        self._num_out = 0

    def complete(self, index: int) -> None:
        """This parameter's gradient is complete; does nothing if all buckets are out, or leave at the end.

        Raises:
            UsageError: it was complete before, so that its bucket may be outdated.
        """
        hook = self._hooks[index] if self._hooks else None
        if hook is not None and next(reversed(hook.hooks_dict_ref())) != hook.id:
            self._has_followers = True
            return
        if self._num_out >= len(self._awaited):
            return
        awaited = self._awaited[self._bucket_of[index]]
        if index not in awaited:
            raise UsageError(
                "One backward pass completed a parameter's gradient twice, as reentrant checkpointing does: use"
                " torch.utils.checkpoint(..., use_reentrant=False)."
            )
        awaited.remove(index)
        while self._num_out < len(self._awaited) and not self._awaited[self._num_out]:
            self._hand_out()

    def complete_all(self) -> None:
        """Backward has ended: hands out the rest; gradients that it skipped keep their earlier values, or are zero."""
        while self._num_out < len(self.vectors):
            self._hand_out()
        if self._has_followers:
            self._has_followers = False
            for index, parameter in enumerate(self._parameters):
                if parameter.requires_grad:  # else the loop has frozen it
                    self._hooks[index].remove()
                    self._hooks[index] = self._hooked(index)

    def _hooked(self, index: int) -> Any:
        return self._parameters[index].register_post_accumulate_grad_hook(partial(self._tell, index))

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._ready = _nobody

    @torch.no_grad()
    def _hand_out(self) -> None:
        number = self._num_out
        targets, sources = [], []
        for index in self._members[number]:
            view, gradient = self._views[index], self._parameters[index].grad
            if gradient is None:
                view.zero_()
                self._without.append(index)
            elif gradient.layout != torch.strided:
                raise UsageError(TAKES_DENSE)
            elif gradient.data_ptr() != view.data_ptr():
                targets.append(view)
                sources.append(gradient)
        if targets:
            foreach_copy(targets, sources)
        self._num_out += 1
        self._ready(self.vectors[number])


def _tell(owner: weakref.WeakMethod[Callable[[int], None]], index: int, parameter: torch.Tensor) -> None:
    on_gradient = owner()
    if on_gradient is not None:
        on_gradient(index)


def _nobody(bucket: torch.Tensor) -> None:
    raise AssertionError("a bucket is complete before a backward pass has begun")
