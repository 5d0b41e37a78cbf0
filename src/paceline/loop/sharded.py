"""An optimizer that steps on some elements of its parameters, and keeps state only for these."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from paceline.optim.flat import FlatBinding
from paceline.optim.ranges import Ranges
from paceline.optim.saved_state import check_length, first_state
from paceline.optim.settings import check_elementwise
from paceline.ports.ports import Collectives
from paceline.ports.replica import Piece

SEES_A_PART = (
    "Under all-reduce(sharded=true) a worker sees its own part of the mean gradient only, so a loop cannot clip or change"
    " gradients between backward and step, nor scale them with GradScaler: use all-reduce without sharded."
)


def check_sharded(optimizer: torch.optim.Optimizer) -> None:
    """Refuses optimizers that may look at more than one element at a time.

    Raises:
        UsageError: with the remedy.
    """
    check_elementwise(
        optimizer,
        "all-reduce(sharded=true) lets every worker update some elements only, which {optimizer} may not allow",
        ", or all-reduce without sharded",
    )


def cut_flat_state(state: dict[str, Any], num_elements: int, size: int, pieces: Sequence[Piece]) -> None:
    """Cuts state for a whole flat vector (P,) to the pieces, (size,)."""
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.shape == (num_elements,) and num_elements != size:
            state[name] = value.new_zeros(size)
            for first, length, at in pieces:
                state[name][at : at + length] = value[first : first + length]
    check_length(state, size)


def in_pieces(ranges: Ranges, pieces: Sequence[Piece]) -> dict[tuple[int, int], tuple[int, int]]:
    """Where ranges of the flat vector (P,), of one parameter each, lie among its pieces; a parameter holds at most one."""
    spans = ((one, _span(one[0], one[1] - one[0], pieces)) for one in ranges)
    return {one: (span.at, span.at + span.end - span.begin) for one, span in spans if span is not None}


class _Span(NamedTuple):
    """The owned elements of one parameter; a parameter lies in one bucket, and so has at most one piece."""

    begin: int  # in the parameter's memory
    end: int
    at: int  # in the vectors of what is owned


class OwnedPieces:
    """Lets the user's optimizer step on owned elements: binds parameters and gradients to these during its step.

    Before and after, both have the shapes that the loop knows. The optimizer makes state in the shape of the owned elements;
    `make_whole` gives it the parameters' shapes at the end.

    Args:
        pieces: what this worker owns.

    Raises:
        UsageError: the optimizer does not work element by element.
    """

    def __init__(self, binding: FlatBinding, optimizer: torch.optim.Optimizer, pieces: Sequence[Piece]) -> None:
        check_sharded(optimizer)
        self._binding = binding
        self._optimizer = optimizer
        self._spans = [
            _span(offset, p.numel(), pieces) for p, offset in zip(binding.parameters, binding.offsets, strict=True)
        ]
        self._before: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        kinds = self._state_kinds() if optimizer.state else [{} for _ in self._spans]
        for parameter, span, own in zip(binding.parameters, self._spans, kinds, strict=True):
            self._cut(parameter, span, own)

    def bind(self, x: torch.Tensor, g: torch.Tensor, missing: Ranges = ()) -> None:
        """Binds parameters to their elements in `x` (S,) and `g` (S,); those without any, and `missing`, have no gradient."""
        self._before = [(p.data, p.grad) for p in self._binding.parameters]
        for parameter, span in zip(self._binding.parameters, self._spans, strict=True):
            parameter.grad = None
            if span is not None:
                parameter.data = x[span.at : span.at + span.end - span.begin]
                parameter.grad = g[span.at : span.at + span.end - span.begin]
        self._binding.leave_out(missing)

    def release(self) -> None:
        for parameter, (data, grad) in zip(self._binding.parameters, self._before, strict=True):
            parameter.grad = None
            parameter.data, parameter.grad = data, grad
        self._before = []

    def make_whole(self, collectives: Collectives) -> None:
        """Collects the optimizer's state of all workers in the parameters' shapes; all call it at the same time.

        A parameter that never had a gradient has no state on any worker, and gets none.
        """
        parameters = self._binding.parameters
        kinds = self._state_kinds()
        if any(kinds):
            have = torch.tensor([float(bool(self._optimizer.state.get(p))) for p in parameters])
            collectives.start_all_reduce(have).wait()
            kinds = [kind if has else {} for kind, has in zip(kinds, have.tolist(), strict=True)]
        names = sorted({name for kind in kinds for name in kind})
        for name in names:
            x = self._binding.zeros()
            numbers = torch.zeros(len(parameters), dtype=torch.float64)
            for index, (p, span) in enumerate(zip(parameters, self._spans, strict=True)):
                value = self._optimizer.state.get(p, {}).get(name) if span is not None else None
                if value is None or span is None:
                    continue
                if isinstance(value, torch.Tensor) and value.dim():
                    first = self._binding.offsets[index]
                    x[first + span.begin : first + span.end] = value
                elif span.begin == 0:  # one worker of those that own a part of it
                    numbers[index] = float(value)
            for vector in (x, numbers):
                collectives.start_all_reduce(vector).wait()
            for p, kind, view, number in zip(parameters, kinds, self._binding.views(x), numbers, strict=True):
                if name in kind:
                    self._optimizer.state[p][name] = _like(kind[name], p, view, number.item())
        self._spans = []

    def _state_kinds(self) -> list[dict[str, Any]]:
        """By parameter, what state the optimizer makes."""
        by_parameter: dict[int, dict[str, Any]] = {}
        like = torch.zeros(2, dtype=self._binding.dtype, device=self._binding.device)
        for group in self._optimizer.param_groups:
            kinds = first_state(self._optimizer, group, like)
            by_parameter |= {id(parameter): kinds for parameter in group["params"]}
        return [by_parameter.get(id(parameter), {}) for parameter in self._binding.parameters]

    def _cut(self, parameter: nn.Parameter, span: _Span | None, kinds: dict[str, Any]) -> None:
        """Keeps this worker's part of the parameter's optimizer state."""
        if parameter not in self._optimizer.state:
            return
        if span is None:
            del self._optimizer.state[parameter]
            return
        state = self._optimizer.state[parameter]
        for name, value in state.items():
            kind = kinds.get(name, value)  # a parameter without dimensions has elements of state without any
            is_of_elements = isinstance(kind, torch.Tensor) and kind.dim() > 0
            if is_of_elements and isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                memory = value.new_empty_strided(value.shape, parameter.stride()).copy_(value)
                state[name] = memory.as_strided((value.numel(),), (1,))[span.begin : span.end].clone()
        check_length(state, span.end - span.begin)


def _span(offset: int, numel: int, pieces: Sequence[Piece]) -> _Span | None:
    for first, length, at in pieces:
        begin, end = max(offset, first), min(offset + numel, first + length)
        if begin < end:
            return _Span(begin - offset, end - offset, at + begin - first)
    return None


def _like(kind: Any, parameter: nn.Parameter, view: torch.Tensor, number: float) -> Any:
    """A value of this kind: as large as the parameter, or a number, in a tensor or not."""
    if kind is None:
        return None
    if not isinstance(kind, torch.Tensor):
        return type(kind)(number)
    if kind.dim():
        return kind.new_empty_strided(parameter.shape, view.stride()).copy_(view)
    return kind.new_tensor(number)
