"""The vector that a worker sends for a fragment, and how the mean is merged when it arrives, possibly some steps late.

Shapes: x, sent, mean: (n,), elements of one fragment. Means of half types are computed and merged in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch

from paceline.compression.codec import Codec, NoCodec
from paceline.errors import UsageError
from paceline.optim.half_types import sum_type
from paceline.optim.outer import Outer
from paceline.system.saved_state import check_fits

Merge = Literal["paper", "corrected", "cocod"]

_WHAT = "the last average"


class Rule:
    """The method-specific part of the engine; this base class has no state."""

    sends_a_copy = False  # whether the fragment itself is sent, and so must be copied
    moved_out = 1.0  # vectors read and written to make the sent vector, besides that copy
    moved_in: float  # vectors read and written by the merge, besides copying its result to the parameters

    def outgoing(self, fragment: int, x: torch.Tensor) -> torch.Tensor:
        """The vector to average (n,): `x` itself, or a new vector."""
        raise NotImplementedError

    def merged(self, fragment: int, x: torch.Tensor, sent: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        """The merged `x` (n,), from this worker's `sent` vector and the `mean` of all, which may be overwritten."""
        raise NotImplementedError

    def common(self, fragment: int) -> list[torch.Tensor]:
        """The vectors (n,) of its state that are equal on all workers."""
        return []

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint."""
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """Restores `state`; raises `UsageError` if it is of another model."""


class _OfAnchors(Rule):
    """Sends changes since the anchors: by fragment, the last parameters (n,) that all workers had in common."""

    def __init__(self, anchors: list[torch.Tensor]) -> None:
        self._anchors = [anchor.to(sum_type(anchor.dtype), copy=True) for anchor in anchors]

    def common(self, fragment: int) -> list[torch.Tensor]:
        return [self._anchors[fragment]]

    def state(self) -> dict[str, Any]:
        return {"anchors": list(self._anchors)}

    def load(self, state: dict[str, Any]) -> None:
        check_fits(state, self.state(), _WHAT)
        self._anchors = state["anchors"]


class MeanOfModels(Rule):
    """Averages parameters: for local SGD, DaSGD and CoCoD-SGD.

    Args:
        merge: "paper": local_weight * x + (1 - local_weight) * mean; "corrected": x + (1 - local_weight) * (mean - sent);
            "cocod": mean + (x - sent).
        local_weight: xi.
    """

    sends_a_copy = True
    moved_out = 0.0

    def __init__(self, merge: Merge = "paper", local_weight: float = 0.0) -> None:
        self._merge = merge
        self._local_weight = 0.0 if merge == "cocod" else local_weight
        self.moved_in = 6.0 if merge != "paper" else 3.0 * (local_weight > 0)

    def outgoing(self, fragment: int, x: torch.Tensor) -> torch.Tensor:
        return x

    def merged(self, fragment: int, x: torch.Tensor, sent: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        if self._merge == "paper":
            return torch.lerp(mean, x.to(mean.dtype), self._local_weight) if self._local_weight else mean
        return torch.add(x, mean - sent, alpha=1 - self._local_weight)


class OfChanges(_OfAnchors):
    """Averages models by sending the changes since the last mean, so that codec errors shrink with the changes.

    Costs: the last mean, on every worker.
    """

    def __init__(self, rule: MeanOfModels, anchors: list[torch.Tensor]) -> None:
        super().__init__(anchors)
        self._rule = rule  # merges the models
        self.moved_in = rule.moved_in + 6.0

    def outgoing(self, fragment: int, x: torch.Tensor) -> torch.Tensor:
        return x - self._anchors[fragment]

    def merged(self, fragment: int, x: torch.Tensor, sent: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        anchor = self._anchors[fragment]
        self._anchors[fragment] = anchor + mean
        return self._rule.merged(fragment, x, anchor + sent, self._anchors[fragment])


class OuterStep(_OfAnchors):
    """Averages changes since the last merge; an outer optimizer steps with their mean: for DiLoCo.

    Costs: the outer parameters, which are the anchors, and their momentum if there is one, equal on every worker.
    """

    def __init__(self, outer: Outer, local_weight: float, anchors: list[torch.Tensor]) -> None:
        super().__init__(anchors)
        self._outer = outer
        self._local_weight = local_weight  # alpha, of the worker's own parameters in the merge
        self._momenta = [one.new_zeros(one.shape) if outer.has_momentum else None for one in self._anchors]
        self.moved_in = 3.0 + 6.0 * outer.has_momentum + 3.0 * (local_weight > 0)

    def outgoing(self, fragment: int, x: torch.Tensor) -> torch.Tensor:
        return self._anchors[fragment] - x

    def merged(self, fragment: int, x: torch.Tensor, sent: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        anchor, self._momenta[fragment] = self._outer.step(self._anchors[fragment], mean, self._momenta[fragment])
        self._anchors[fragment] = anchor
        return torch.lerp(anchor, x.to(anchor.dtype), self._local_weight) if self._local_weight else anchor

    def common(self, fragment: int) -> list[torch.Tensor]:
        return [one for one in (self._anchors[fragment], self._momenta[fragment]) if one is not None]

    def state(self) -> dict[str, Any]:
        momenta = {str(index): one for index, one in enumerate(self._momenta) if one is not None}
        return {"anchors": list(self._anchors), "momenta": momenta}

    def load(self, state: dict[str, Any]) -> None:
        momenta = {str(index): anchor for index, anchor in enumerate(self._anchors)}
        found = state.get("momenta")
        kept = {key: momenta.get(key) for key in found} if isinstance(found, dict) else {}
        check_fits(state, {"anchors": self._anchors, "momenta": kept}, _WHAT)
        self._anchors = state["anchors"]
        if self._outer.has_momentum:
            self._momenta = [state["momenta"].get(key, rest) for key, rest in zip(momenta, self._momenta, strict=True)]


def rule_of_models(rule: MeanOfModels, codec: Codec, common: Callable[[], list[torch.Tensor]]) -> Rule:
    """Without a codec, the rule itself; with a codec, a rule that sends changes since the parameters of `common`."""
    return rule if isinstance(codec, NoCodec) else OfChanges(rule, common())


def progress_of(period: int, delay: int, local_weight: float) -> float:
    """The share of the local steps that a merge keeps if it weighs a worker's newest parameters by `local_weight`.

    >>> progress_of(period=4, delay=1, local_weight=0.25), progress_of(period=4, delay=4, local_weight=0.0)
    (0.8125, 0.0)
    """
    return 1 - (1 - local_weight) * delay / period


def refuse_no_progress(factor: float) -> None:
    """Refuses merges that drop every local step."""
    if factor <= 0:
        raise UsageError(
            "With a delay of a whole period and local_weight 0, every merge discards all that was learnt since the "
            "last one, so the model never changes: choose a shorter delay, or a local_weight above 0."
        )


def slow_progress(factor: float, rate_factor: float = 1.0) -> str:
    """A warning if merges keep less than half of the progress, or steps are lengthened accordingly; else empty."""
    if factor >= 0.5:
        return ""
    made_up = (
        "" if rate_factor == 1 else f", so that the learning rate is multiplied by {rate_factor:.3g} to make up for it"
    )
    otherwise = "" if rate_factor == 1 else ", or compensate=false where training does not bear such steps"
    return (
        f"Merges drop what was learnt during the delay, which leaves {factor:.2f} of the progress of the same steps without a"
        f" delay{made_up}: choose a shorter delay, a longer period or a larger local_weight{otherwise}."
    )
