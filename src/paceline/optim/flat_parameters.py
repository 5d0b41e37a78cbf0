"""An elementwise optimizer on a flat vector, as a single parameter as long as all elements have gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from paceline.optim.ranges import Ranges
from paceline.optim.saved_state import check_length
from paceline.optim.settings import cut_state, raw_step, scaled_step
from paceline.system.saved_state import unfit


class _Stretch(NamedTuple):
    """Contiguous elements of one parameter."""

    parameter: nn.Parameter
    elements: slice
    owner: tuple[int, int]  # all elements of that parameter of the model
    block: int


class FlatParameters:
    """Steps an optimizer on a flat vector, skipping elements without a gradient.

    A single parameter for all saves PyTorch's loop over parameters. From the first step in which some have no gradient, each
    of the model's parameters becomes its own: skipped parameters need their own state, such as Adam's number of steps.
    """

    def __init__(
        self,
        make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],  # builds the optimizer, of one group
        like: torch.Tensor,  # a vector (P,) of the same type
        num_blocks: int = 1,  # pieces of equal length that are stepped on one after the other
        *,
        # Whether all workers share its state, which then stays whole, with one count of steps.
        shares_state: bool = False,
    ) -> None:
        size = len(like)
        self._blocks = [slice(size * n // num_blocks, size * (n + 1) // num_blocks) for n in range(num_blocks)]
        self._whole = [nn.Parameter(torch.empty_like(like[block])) for block in self._blocks]
        self._stretches: list[_Stretch] = []
        self._loaded: list[nn.Parameter] = []  # stretches of which only the state is known
        self._make = make_optimizer
        self.optimizer = make_optimizer(self._whole)  # the built optimizer
        self._step = raw_step(self.optimizer)
        self._apart = self.optimizer  # steps on the stretches
        self._shares_state = shares_state

    def expect(self, num_parameters: int) -> None:
        """Prepares to load a saved state of `num_parameters` parameters."""
        if num_parameters != len(self._whole):
            self._loaded = [self._another() for _ in range(num_parameters)]
            self.optimizer.param_groups[0]["params"] = self._loaded

    def state_of_all(self) -> dict[str, Any]:
        """The optimizer's state of the whole vector, as long as it is in one piece."""
        return self.optimizer.state.get(self._whole[0], {})

    def step(
        self, x: torch.Tensor, g: torch.Tensor, ranges: Ranges, missing: Ranges, scale: float = 1.0, block: int = 0
    ) -> None:
        """One step on a block of `x` (S,), of the same length at every call, with `g` (S,); the caller is under no_grad.

        Args:
            x: updated in place.
            g: its gradient.
            ranges: the model's parameters in it, the same at every call.
            missing: the parameters without a gradient.
            scale: factor on the learning rates.
            block: which.
        """
        if not self._stretches and (missing or self._loaded):
            self._cut(len(x), ranges)
        if self._stretches and (missing or not self._shares_state):
            self._step_on_stretches(x, g, missing, scale, block)
            return
        parameter = self._whole[block]
        if len(self._blocks) > 1:
            x, g = x[self._blocks[block]], g[self._blocks[block]]
        if parameter.grad is not g:
            parameter.grad = None  # which may be of another length
        parameter.data = x
        parameter.grad = g
        scaled_step(self._step, self.optimizer, scale)
        if len(self._blocks) > 1:
            parameter.grad = None  # the optimizer skips blocks without one

    def _step_on_stretches(self, x: torch.Tensor, g: torch.Tensor, missing: Ranges, scale: float, block: int) -> None:
        them, shared, state = set(missing), self.state_of_all() if self._shares_state else {}, {}
        for parameter, elements, owner, number in self._stretches:
            parameter.grad = None
            parameter.data = x[elements]
            if number == block and owner not in them:
                parameter.grad = g[elements]
                if shared:
                    state = self._apart.state[parameter] = cut_state(shared, elements)
        scaled_step(raw_step(self._apart), self._apart, scale)
        for name, value in state.items():
            if not value.dim():
                shared[name].copy_(value)

    def _cut(self, size: int, ranges: Ranges) -> None:
        blocks = self._blocks if len(self._blocks) > 1 else [slice(0, size)]
        places = [
            (slice(max(first, block.start), min(last, block.stop)), (first, last), number)
            for first, last in ranges
            for number, block in enumerate(blocks)
            if max(first, block.start) < min(last, block.stop)
        ]
        parameters = self._loaded or [self._another() for _ in places]
        if len(parameters) != len(places):
            raise unfit("the optimizer", f"the state is of {len(parameters)} parameters in place of {len(places)}")
        self._stretches = [_Stretch(one, *place) for one, place in zip(parameters, places, strict=True)]
        for parameter, elements, *_ in self._stretches:
            check_length(self.optimizer.state.get(parameter, {}), elements.stop - elements.start)
        if self._shares_state:
            self._apart = self._make(parameters)
            return
        for parameter, elements, _, number in self._stretches:
            state, begin = self.optimizer.state.get(self._whole[number]), blocks[number].start
            if state:
                self.optimizer.state[parameter] = cut_state(state, slice(elements.start - begin, elements.stop - begin))
        for whole in self._whole:
            self.optimizer.state.pop(whole, None)
        self.optimizer.param_groups[0]["params"] = parameters

    def _another(self) -> nn.Parameter:
        return nn.Parameter(self._whole[0].new_empty(1))
