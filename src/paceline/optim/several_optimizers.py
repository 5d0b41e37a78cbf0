"""Several optimizers of one loop as one: they step together, or in turn, as for adversarial models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from paceline.errors import UsageError
from paceline.optim.settings import raw_step


class OneOptimizer:
    """The steps of a loop with one optimizer: each is a step of the run."""

    in_turn = False

    def parameters(self, optimizer: torch.optim.Optimizer) -> None:
        return None

    def begins(self, optimizer: torch.optim.Optimizer) -> bool:
        return True

    def ends(self, optimizer: torch.optim.Optimizer) -> bool:
        return True

    def check_turn(self) -> None:
        pass

    def check_whole(self) -> None:
        pass


class SeveralOptimizers(torch.optim.Optimizer):
    """Presents several optimizers as one, with all groups and state.

    Together, a step of the run is over when each has stepped once, in any order. In turn, each step of one optimizer is a step
    of the run, in which the parameters of the others have no gradient.

    Costs: together, about 5 us per parameter in a backward pass.
    """

    def __init__(self, members: Sequence[torch.optim.Optimizer], *, in_turn: bool) -> None:
        self.members = tuple(members)
        self.in_turn = in_turn
        self._raw_steps = [raw_step(one) for one in members]
        self._stepping: list[torch.optim.Optimizer] = []  # those that have begun the present step
        self._set_aside: list[tuple[nn.Parameter, torch.Tensor | None]] = []

    # As one optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [group for one in self.members for group in one.param_groups]

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """A step of each, without hooks; the caller is under no_grad."""
        for step in self._raw_steps:
            step()

    def state_dict(self) -> dict[str, Any]:
        state, groups, before = {}, [], 0
        for one, num_parameters in self._counted():
            own = one.state_dict()
            state |= {before + number: value for number, value in own["state"].items()}
            groups += [
                {**group, "params": [before + number for number in group["params"]]} for group in own["param_groups"]
            ]
            before += num_parameters
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        groups, before = list(state_dict["param_groups"]), 0
        for one, num_parameters in self._counted():
            own, groups = groups[: len(one.param_groups)], groups[len(one.param_groups) :]
            one.load_state_dict(
                {
                    "state": {
                        number - before: value
                        for number, value in state_dict["state"].items()
                        if before <= number < before + num_parameters
                    },
                    "param_groups": [
                        {**group, "params": [number - before for number in group["params"]]} for group in own
                    ],
                }
            )
            before += num_parameters

    def _counted(self) -> Iterator[tuple[torch.optim.Optimizer, int]]:
        for one in self.members:
            yield one, sum(len(group["params"]) for group in one.param_groups)

    def parameters(self, optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
        return [parameter for group in optimizer.param_groups for parameter in group["params"]]

    # Steps

    def watch(self, parameters: Sequence[nn.Parameter]) -> Callable[[], None]:
        """Refuses gradients that arrive after only some of the optimizers have stepped together; returns an undo function."""
        hooks = [] if self.in_turn else [p.register_post_accumulate_grad_hook(self._on_gradient) for p in parameters]

        def undo() -> None:
            for hook in hooks:
                hook.remove()

        return undo

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        if self._stepping:
            raise UsageError(
                f"A backward pass began when {self._named(self._stepping)} had stepped but "
                f"{self._named(self._waiting())} had not: optimizers that step together share one gradient. To give "
                "each its own passes, give the models one by one, as in attach((a, b), [optimizer_a, optimizer_b]), "
                "so that they step in turn."
            )

    def begins(self, optimizer: torch.optim.Optimizer) -> bool:
        """An optimizer is about to step; returns whether it is the first in a step of the run.

        Raises:
            UsageError: it has stepped already, and others have not; or GradScaler steps optimizers that step together.
        """
        if self.in_turn:
            own = set(self.parameters(optimizer))
            self._set_aside = [(p, p.grad) for p in self.parameters(self) if p not in own]
            for p, _ in self._set_aside:
                p.grad = None
            return True
        if hasattr(optimizer, "found_inf"):
            raise UsageError(
                "GradScaler looks at one optimizer's gradients at a time, but here several make one step: leave it "
                "out, and use bfloat16, which needs no scaling."
            )
        if any(one is optimizer for one in self._stepping):
            self.check_whole()
        self._stepping.append(optimizer)
        return len(self._stepping) == 1

    def check_turn(self) -> None:
        """Call it when the program has chosen the parameters to step on.

        Raises:
            UsageError: another worker's step is one of another optimizer.
        """
        if any(parameter.grad is not None for parameter, _ in self._set_aside):
            raise UsageError(
                "Workers step different optimizers in the same round: with an algorithm that averages gradients, all workers"
                " must step the same optimizers in the same order, even if their batches differ."
            )

    def ends(self, optimizer: torch.optim.Optimizer) -> bool:
        """An optimizer has stepped; returns whether it is the last in a step of the run."""
        for parameter, gradient in self._set_aside:
            parameter.grad = gradient
        self._set_aside.clear()
        if len(self._stepping) < len(self.members) and not self.in_turn:
            return False
        self._stepping.clear()
        return True

    def check_whole(self) -> None:
        """Call it where a step must be over; raises `UsageError` if some have stepped, and others have not."""
        if self._stepping:
            stepped, waiting = self._named(self._stepping), self._named(self._waiting())
            self._stepping.clear()
            raise UsageError(
                f"{stepped} has stepped but {waiting} has not: optimizers that attach was given in a list step "
                "together, once each. If they step in turn, give the models one by one, as in attach((a, b), "
                "[optimizer_a, optimizer_b])."
            )

    def _waiting(self) -> list[torch.optim.Optimizer]:
        return [one for one in self.members if not any(one is other for other in self._stepping)]

    def _named(self, some: list[torch.optim.Optimizer]) -> str:
        return " and ".join(
            f"optimizer {number} ({type(one).__name__})"
            for number, one in enumerate(self.members)
            if any(one is other for other in some)
        )


def members_of(optimizer: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, ...]:
    """The optimizers that the loop steps."""
    return optimizer.members if isinstance(optimizer, SeveralOptimizers) else (optimizer,)
