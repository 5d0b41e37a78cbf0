"""Observe a loop that fetches its own batches: its calls of the model, and its backward passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from paceline.data.plan import length_of
from paceline.loop.guards.hidden_hooks import HiddenHook, hookable
from paceline.loop.guards.same_inputs import SameInputs
from paceline.system.torch_internals import graph_task


class DealtBatches:
    """Batches from `worker.batches`: each step begins with one, and its number of samples is known.

    Attributes:
        are_dealt: whether `worker.batches` begins the steps.
    """

    are_dealt = True
    touched: bool = False  # whether a loop with its own batches has begun to compute in this step
    num_passes: int = 0  # backward passes that are over, as far as the loop has gone on since

    def begin_step(self) -> None:
        """The next step begins."""

    def see_pass(self) -> None:
        """A backward pass is under way before any call: its gradients are the first step's."""

    def weighed(self, told: int) -> int | None:
        """The samples of the step so far, given those that the loop reported (`told`); None: they are known already."""
        return None

    def forget(self) -> None:
        """Forgets the passes so far, which have been counted."""

    def close(self) -> None:
        """Stops observing."""


class OwnBatches(DealtBatches):
    """Counts the samples of a step of such a loop, and reports its calls of the model or its parts with gradients enabled.

    For each backward pass it counts the length of the first tensor passed to the last call of the whole model before it; if
    only parts are called, as in `model.decode(model.encode(x))`, to the first such call. Passes add up.

    Costs about 2 us per call of a module and, from the first step without a batch on, 5 us per parameter in a pass.
    """

    are_dealt = False

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        on_call: Callable[[], None],  # called before a call that begins a step, or a pass; its exceptions propagate
        inputs: SameInputs | None = None,  # inspects the inputs of those calls; None: they are not inspected
    ) -> None:
        self._on_call = on_call
        self._inputs = inputs
        self._backward = _Backward()
        self._parameters = parameters
        self._hooks: list[Any] = [
            module.register_forward_pre_hook(HiddenHook(partial(self._called, module is model)), with_kwargs=True)
            for module in hookable(model)
        ]
        self._sees_passes = False
        self._before = self._pass = 0  # samples of the passes before, and of the present one
        self._was_called = False
        self.num_passes = 0

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self._inputs is not None:
            self._inputs.look()

    def begin_step(self) -> None:
        if self._inputs is not None:
            self._inputs.end_step()
        self._before = self._pass = 0
        self._was_called = self._backward.came = False
        self._see_passes()

    def _see_passes(self) -> None:
        """From the first call on: once it has had a hook, a parameter costs every backward pass some 5 us for good."""
        if not self._sees_passes:
            self._sees_passes = True
            self._hooks += [
                one.register_post_accumulate_grad_hook(self._backward) for one in self._parameters if one.requires_grad
            ]

    def see_pass(self) -> None:
        self._see_passes()
        self._backward.came = True

    @property
    def touched(self) -> bool:  # type: ignore[override]
        return self._was_called or self._backward.came

    @property
    def samples(self) -> int:
        """Samples of this step so far; a pass of unknown size counts as one."""
        return self._before + (self._pass or int(self._backward.came))

    def weighed(self, told: int) -> int:
        return told or max(1, self.samples)  # a gradient never weighs 0

    def forget(self) -> None:
        self._before = self._pass = 0
        self._backward.came = False

    def _called(self, is_whole: bool, module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        # What a compiler traces runs later, and without this.
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        if graph_task() >= 0:  # it recomputes what was checkpointed, which may have been called without gradients
            self._pass = self._pass or _first_length(args, kwargs)
            return
        if self._backward.came:
            self._before, self._pass, self._backward.came = self.samples, 0, False
            self.num_passes += 1
        if self._pass and not is_whole:
            return
        self._on_call()
        self._see_passes()
        self._was_called = True
        if self._inputs is not None:
            self._inputs.call((*args, *kwargs.values()))
        self._pass = _first_length(args, kwargs) or self._pass


def _first_length(args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    return length_of((*args, *kwargs.values()))


class _Backward:
    """Whether a backward pass has come; refers to nothing, as the garbage collector does not see who holds such hooks."""

    __slots__ = ("came",)

    def __init__(self) -> None:
        self.came = False

    def __call__(self, parameter: torch.Tensor) -> None:
        self.came = True
