"""Closures that a loop passes to `step`, which the optimizer evaluates once or several times."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, SupportsFloat

import torch

from paceline.algorithms.base import Closures
from paceline.errors import RunStopped, UsageError, WorkerLostError
from paceline.loop.gradient import AttachedGradient
from paceline.system.torch_internals import graph_task

__all__ = ["ClosureGradient"]

_SEVERAL_TIMES = (
    "This optimizer evaluates its closure several times in a step, or after it has moved the parameters, and this algorithm"
    " computes one gradient per step: use lockstep or all-reduce, not sharded and without a codec, or an optimizer that"
    " evaluates its closure once, such as SGD or AdamW."
)
_RAISED = (
    "The closure of the last step raised an error, and the other workers wait for its gradient: let the error end the loop, or"
    " catch it inside the closure."
)


class ClosureGradient(AttachedGradient):
    """A gradient that a closure computes when the optimizer asks for it.

    The optimizers of `torch.optim`, except LBFGS, evaluate their closure once, at the start of a step. Other optimizers may
    evaluate it at any time and as often as they like:

    - *In place*, with one worker: the closure runs at the trained parameters, while the program applies the gradient.
    - *In rounds*: likewise, and each evaluation is a round of all workers. The closure returns the mean loss and leaves the
      mean gradient, both weighted by samples.
    - *On a copy*: the optimizer steps on a private copy of the parameters, outside any lock. The program then applies the
      difference.
    - *Once*: a second evaluation raises an error, and so does one after the optimizer has moved the parameters.

    Args:
        optimizer: the loop's.
        base: as for `BaseReplica`.

    Attributes:
        evaluates: one of these.
        look: called with the optimizer after a closure has computed a gradient, before workers average it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, **base: Any) -> None:
        super().__init__(**base)
        self._optimizer = optimizer
        self._inside = False  # the replica itself is stepping: its hooks keep still
        self.evaluates: Closures = "once"
        self.look: Callable[[torch.optim.Optimizer], None] = lambda optimizer: None
        self._closure: _Closure | None = None  # of the step under way
        # A class may call its base's `step`, which has hooks of its own.
        self._stepping: torch.optim.Optimizer | None = None
        self._nested = 0
        self._difference: torch.Tensor | None = None  # that a step on a copy has made

    def apply_difference(self, optimizer: torch.optim.Optimizer, difference: torch.Tensor) -> None:
        """Lets the program apply the `difference` (P,) that a step on a copy has made."""
        self._difference = difference
        self.prepare_step(optimizer)
        self._difference = None

    def prepare_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Hands the gradient to the program, which chooses the parameters to apply it to."""
        raise NotImplementedError

    def before_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Prepares a step, or its closure; returns other arguments for `step`, or None."""
        if self._inside or optimizer is self._stepping:
            self._nested += not self._inside
            return None
        if graph_task() >= 0:
            raise UsageError(
                "The loop calls step() inside backward, as hooks that step each parameter by itself do; attach needs the whole"
                " gradient before a step: call step() after backward(), of one optimizer with all parameters."
            )
        if self.evaluations is not None and self.evaluations.under_way:
            raise UsageError(_RAISED)
        self.awaited = self._closure = None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        self.closure = callable(closure) if self.evaluates == "in rounds" else None
        if callable(closure):
            kind = _Once if self.evaluates == "once" or _evaluates_once(optimizer) else _KINDS[self.evaluates]
            self._closure = kind(self, optimizer, closure)
        else:
            self.prepare_step(optimizer)
        self._stepping = optimizer
        if self._closure is None:
            return None
        if "closure" in kwargs:
            return args, {**kwargs, "closure": self._closure}
        return (optimizer, self._closure, *args[2:]), kwargs

    def forget_step(self) -> None:
        """The last step is over, also if it has raised an error that the loop has caught."""
        self._stepping, self._nested = None, 0

    def evaluate(self, closure: Callable[[], Any], average: Callable[[], None]) -> Any:
        """Computes another gradient of the step under way; returns the loss.

        Args:
            closure: computes it.
            average: averages it over all workers, unless `backward` has done so.
        """
        before, self._state = self._state, "gradient"
        self._handed_out = self._g_is_mine = False
        self._missing = self.ranges if self.repeats else None
        if self._own is not None:
            self._own.forget()
        loss = closure()
        self._weigh()
        self.look(self._optimizer)
        if self._ready is not None and not self._handed_out:
            self._hand_out_all()
        average()
        if self._g_is_mine:
            self.binding.scatter_gradients(self.g, self.missing)
        self._state = before
        return loss

    def mean_loss(self, loss: Any) -> Any:
        """Averages the losses of all workers' closures, where evaluations are rounds."""
        if self.evaluates != "in rounds":
            return loss
        assert self.evaluations is not None
        if isinstance(loss, torch.Tensor):
            value = loss.item() if loss.numel() == 1 else None
        else:
            value = float(loss) if isinstance(loss, SupportsFloat) else None
        mean = self.evaluations.mean(value, self.samples)
        if mean is None:
            return loss
        if isinstance(loss, torch.Tensor):
            return torch.full_like(loss, mean)
        return torch.tensor(mean, dtype=self.binding.dtype, device=self.binding.device) if value is None else mean

    def raise_if_stopped(self, cause: Exception | None = None) -> None:
        """Raises `RunStopped` where the run is over."""
        if self._stopped():
            raise RunStopped("the run was stopped") from cause


class _Closure:
    """What an optimizer gets in place of the loop's closure, for one step.

    Args:
        replica: the worker's.
        optimizer: evaluates it.
        closure: the loop's.
    """

    def __init__(self, replica: ClosureGradient, optimizer: torch.optim.Optimizer, closure: Callable[[], Any]) -> None:
        self._replica, self._optimizer, self._closure = replica, optimizer, closure
        self.is_running = False
        self._begin()

    def _begin(self) -> None:
        self._replica.prepare_step(self._optimizer)

    def __call__(self) -> Any:
        self.is_running = True
        try:
            return self._evaluate()
        except BaseException as error:
            self._replica.forget_step()
            if isinstance(error, WorkerLostError):  # others saw first that the run is over, and left
                self._replica.raise_if_stopped(error)
            raise
        finally:
            self.is_running = False

    def _evaluate(self) -> Any:
        return self._replica.evaluate(self._closure, lambda: None)

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
        loss = self._closure()
        self._replica.look(self._optimizer)
        self._replica.prepare_step(self._optimizer)
        return self._replica.mean_loss(loss)

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
        return replica.mean_loss(replica.evaluate(self._closure, evaluations.average))

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
