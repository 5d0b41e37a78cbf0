"""Hooks around `optimizer.step()`, and the closures that a loop passes to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, SupportsFloat

import torch

from paceline.algorithms.base import Closures
from paceline.errors import UsageError, WorkerLostError
from paceline.loop.guards.guard import Guards
from paceline.optim.flat import FlatBinding
from paceline.system.torch_internals import graph_task

_SEVERAL_TIMES = (
    "This optimizer evaluates its closure several times in a step, or after it has moved the parameters, and this algorithm"
    " computes one gradient per step: use lockstep or all-reduce, not sharded and without a codec, or an optimizer that"
    " evaluates its closure once, such as SGD or AdamW."
)
_RAISED = (
    "The closure of the last step raised an error, and the other workers wait for its gradient: let the error end the loop, or"
    " catch it inside the closure."
)


class Stepped(Protocol):
    """The replica as the hooks use it."""

    binding: FlatBinding
    awaited: Any
    closure: bool | None
    evaluations: Any

    @property
    def samples(self) -> int: ...
    @property
    def repeats(self) -> bool: ...

    def prepare_step(self, optimizer: torch.optim.Optimizer) -> None: ...
    def finish_step(self, optimizer: torch.optim.Optimizer) -> None: ...
    def evaluate(self, closure: Callable[[], Any], average: Callable[[], None]) -> Any: ...
    def apply_difference(self, optimizer: torch.optim.Optimizer, difference: torch.Tensor) -> None: ...
    def settle_outside(self) -> None: ...
    def raise_if_stopped(self, cause: Exception | None = None) -> None: ...


class StepHooks:
    """Passes each step of the loop's optimizers to the replica: once, or for each evaluation of its closure.

    The optimizers of `torch.optim`, except LBFGS, evaluate their closure once, at the start of a step. Other optimizers may
    evaluate it at any time and as often as they like:

    - *In place*, with one worker: the closure runs at the trained parameters, while the program applies the gradient.
    - *In rounds*: likewise, and each evaluation is a round of all workers. The closure returns the mean loss and leaves the
      mean gradient, both weighted by samples.
    - *On a copy*: the optimizer steps on a private copy of the parameters, outside any lock. The program then applies the
      difference.
    - *Once*: a second evaluation raises an error, and so does one after the optimizer has moved the parameters.
    """

    def __init__(self, replica: Stepped) -> None:
        self._replica = replica
        self.guards = Guards()  # called before a step, once its gradient is computed, and after it
        self.evaluates: Closures = "once"  # one of the kinds listed above
        self._closure: _Closure | None = None  # of the step under way
        # A class may call its base's `step`, which has hooks of its own.
        self._stepping: torch.optim.Optimizer | None = None
        self._nested = 0

    def before(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Prepares a step, or its closure; returns other arguments for `step`, or None."""
        replica = self._replica
        if optimizer is self._stepping:
            self._nested += 1
            return None
        if graph_task() >= 0:
            raise UsageError(
                "The loop calls step() inside backward, for example in a hook of each parameter, but attach needs the whole"
                " gradient before a step: use one optimizer with all parameters, and call its step() after backward()."
            )
        if replica.evaluations is not None and replica.evaluations.under_way:
            raise UsageError(_RAISED)
        replica.awaited = self._closure = None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        replica.closure = callable(closure) if self.evaluates == "in rounds" else None
        if callable(closure):
            kind = _Once if self.evaluates == "once" or _evaluates_once(optimizer) else _KINDS[self.evaluates]
            self._closure = kind(replica, self, optimizer, closure)
        else:
            self.gradient_is_computed(optimizer)
            replica.prepare_step(optimizer)
        self._stepping = optimizer
        if self._closure is None:
            return None
        if "closure" in kwargs:
            return args, {**kwargs, "closure": self._closure}
        return (optimizer, self._closure, *args[2:]), kwargs

    def after(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._nested:
            self._nested -= 1
            return
        closure, self._closure = self._closure, None
        if closure is not None:
            closure.end()
        self._stepping = None
        self._replica.finish_step(optimizer)
        for call in self.guards.after_step:
            call(optimizer)

    def gradient_is_computed(self, optimizer: torch.optim.Optimizer) -> None:
        """Calls the guards, before workers average the gradient."""
        for call in self.guards.before_step:
            call(optimizer)

    def forget_step(self) -> None:
        """The last step is over, also if it has raised an error that the loop has caught."""
        self._stepping, self._nested = None, 0

    def close(self) -> None:
        """Drops the replica after the last step: a cycle of references would keep its memory until a garbage collection."""
        self._closure = None
        del self._replica

    @property
    def is_evaluating(self) -> bool:
        return self._closure is not None and self._closure.is_running


class _Closure:
    """The closure that an optimizer gets instead of the loop's, for one step."""

    def __init__(
        self,
        replica: Stepped,
        hooks: StepHooks,  # that made it
        optimizer: torch.optim.Optimizer,  # evaluates it
        closure: Callable[[], Any],
    ) -> None:
        self._replica, self._hooks, self._optimizer, self._closure = replica, hooks, optimizer, closure
        self.is_running = False
        self._begin()

    def _begin(self) -> None:
        self._replica.prepare_step(self._optimizer)

    def __call__(self) -> Any:
        self.is_running = True
        try:
            return self._evaluate()
        except BaseException as error:
            self._hooks.forget_step()
            if isinstance(error, WorkerLostError):  # others saw first that the run is over, and left
                self._replica.raise_if_stopped(error)
            raise
        finally:
            self.is_running = False

    def _evaluate(self) -> Any:
        return self._replica.evaluate(self._compute, lambda: None)

    def _compute(self) -> Any:
        loss = self._closure()
        self._hooks.gradient_is_computed(self._optimizer)
        return loss

    def end(self) -> None:
        """Ends the optimizer's step."""


class _Once(_Closure):
    """The only evaluation is the gradient of the step."""

    def _begin(self) -> None:
        self._is_evaluated = False
        parameters = self._replica.binding.parameters
        is_known = _evaluates_once(self._optimizer)
        self._at = [] if is_known else [(one, one.detach().clone()) for one in parameters]

    def _evaluate(self) -> Any:
        if self._is_evaluated or not all(torch.equal(*pair) for pair in self._at):
            raise UsageError(_SEVERAL_TIMES)
        self._is_evaluated = True
        loss = self._compute()
        self._replica.prepare_step(self._optimizer)
        return _mean_loss(self._replica, loss) if self._hooks.evaluates == "in rounds" else loss

    def end(self) -> None:
        if not self._is_evaluated:
            raise UsageError(
                f"{type(self._optimizer).__name__} did not evaluate the closure that step() was given, so there is no"
                " gradient: call backward() before step(), and give it no closure."
            )


class _InRounds(_Closure):
    def _evaluate(self) -> Any:
        replica, evaluations = self._replica, self._replica.evaluations
        evaluations.begin()
        return _mean_loss(replica, replica.evaluate(self._compute, evaluations.average))

    def end(self) -> None:
        self._replica.evaluations.end()


class _OnCopy(_Closure):
    def _begin(self) -> None:
        self._replica.settle_outside()
        binding = self._replica.binding
        self._at = binding.bound_to
        assert self._at is not None
        self._before, self._copy = self._at.clone(), self._at.clone()
        binding.bind(self._copy)

    def end(self) -> None:
        assert self._at is not None
        self._replica.binding.bind(self._at)
        difference = self._copy.sub_(self._before)
        self._replica.apply_difference(self._optimizer, difference.zero_() if self._replica.repeats else difference)


_KINDS: dict[Closures, type[_Closure]] = {"in place": _Closure, "in rounds": _InRounds, "on a copy": _OnCopy}


def _evaluates_once(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer is known to evaluate its closure once, at the start of its step."""
    return type(optimizer).__module__.startswith("torch.optim.") and not isinstance(optimizer, torch.optim.LBFGS)


def _mean_loss(replica: Stepped, loss: Any) -> Any:
    """Averages the losses of all workers' closures, if every evaluation is a round."""
    if isinstance(loss, torch.Tensor):
        value = loss.item() if loss.numel() == 1 else None
    else:
        value = float(loss) if isinstance(loss, SupportsFloat) else None
    mean = replica.evaluations.mean(value, replica.samples)
    if mean is None:
        return loss
    if isinstance(loss, torch.Tensor):
        return torch.full_like(loss, mean)
    return torch.tensor(mean, dtype=replica.binding.dtype, device=replica.binding.device) if value is None else mean
