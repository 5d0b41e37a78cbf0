"""How a shard applies a gradient to its part of the vector: the base classes, and the rules without second moments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from paceline.algorithms.server.update import UpdateInfo
from paceline.errors import UsageError
from paceline.optim.rows import Selection
from paceline.optim.settings import OptimizerSettings
from paceline.specs.bounds import DECAY
from paceline.specs.types import check_fields
from paceline.system.saved_state import check_fits

WHAT = "the servers' state"  # of a checkpoint


def one_rate(settings: OptimizerSettings) -> float:
    """The learning rate of all groups that have elements, for a rule that has one.

    Raises:
        UsageError: they have different ones.
    """
    rates = sorted({float(dict(group.values)["lr"]) for group in settings.groups if group.ranges})
    if len(rates) > 1:
        raise UsageError(
            f"The servers' rule has one learning rate, but the optimizer's groups have {', '.join(map(str, rates))}: use one,"
            " or `parameter-server`, whose servers apply the workers' optimizer."
        )
    return rates[0] if rates else settings.learning_rate


@dataclass(frozen=True, kw_only=True)
class ApplyRule:
    """A rule that applies gradients; immutable, so that a spec can hold it. `start` makes the stateful `Applier`."""

    #: Whether scaling a gradient by c scales its effect by c, now and later; for `user`, see `check_linear`.
    is_linear: ClassVar[bool] = False
    moved_vectors: ClassVar[float | None] = None

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def default_learning_rate(self) -> float | None:
        """The default learning rate of a rule whose steps are not sized like SGD's."""
        return None

    @property
    def overrides_optimizer(self) -> bool:
        """Whether it replaces the workers' own optimizer."""
        return True

    @property
    def echoes(self) -> bool:
        """Whether readers get a vector with the parameters that must come back with the gradient (`Applier.read`)."""
        return False

    @property
    def takes_rows(self) -> bool:
        """Whether it can apply gradients of some rows only, and leave all others as they are."""
        return True

    @property
    def takes_lookups(self) -> bool:
        """Whether a worker can get single rows after the parameters, and so at a later version."""
        return True

    @property
    def update_vectors(self) -> float | None:
        """How many vectors of the shard's length an update reads and writes; None: as many as the workers' optimizer."""
        return self.moved_vectors

    def start(self, num_elements: int, dtype: torch.dtype) -> Applier:
        """An applier for a shard with this many elements."""
        raise TypeError(f"{type(self).__name__} must define start")


class Applier:
    """A rule's state on one shard.

    Args:
        step: applies a gradient: `step(x, gradient, info, learning_rate, **state)`; None: a subclass defines `apply`.
        **state: tensors, by their names in a snapshot.
    """

    #: Whether `read` stores what `apply` needs; `reads` and `load_reads` hand it over.
    keeps_reads: ClassVar[bool] = False
    copies_state: ClassVar[bool] = False  # whether `state` returns copies
    #: Whether `apply` skips elements without a gradient; if not, `update` restores them.
    leaves_out: ClassVar[bool] = False
    #: Whether `apply` takes a gradient (count,) of selected elements; if not, `update` gives it these elements of x and state.
    takes_selection: ClassVar[bool] = False
    postponed: int = 0  # by how many updates the last gradient is delayed

    def __init__(self, step: Callable[..., None] | None = None, **state: Tensor) -> None:
        self._step, self._state = step, state

    @property
    def innermost(self) -> Applier:
        """The applier inside all wrappers."""
        return self

    def apply(self, x: Tensor, gradient: Tensor, info: UpdateInfo, learning_rate: float) -> None:
        """Apply one gradient (P_s,) to the shard's vector x (P_s,), in place; the gradient is only read."""
        self._step_with(self._state, x, gradient, info, learning_rate)

    def _step_with(
        self, state: dict[str, Tensor], x: Tensor, gradient: Tensor, info: UpdateInfo, learning_rate: float
    ) -> None:
        """Applies a gradient (n,) to the elements x (n,) that have this state, in place."""
        if self._step is None:
            raise TypeError(f"{type(self).__name__} must define apply")
        self._step(x, gradient, info, learning_rate, **state)

    def update(self, x: Tensor, gradient: Tensor, info: UpdateInfo, learning_rate: float) -> None:
        """`apply`, except that elements without a gradient keep their values and state: no momentum, no decay."""
        if info.selection is not None and not self.takes_selection:
            self._update_selected(info.selection, x, gradient, info, learning_rate)
            return
        missing = () if self.leaves_out else info.missing
        vectors = [x, *(one for one in self._state.values() if one.dim())] if missing else []
        kept = [(part, part.clone()) for first, last in missing for part in (one[first:last] for one in vectors)]
        self.apply(x, gradient, info, learning_rate)
        for part, before in kept:
            part.copy_(before)

    def _update_selected(
        self, selection: Selection, x: Tensor, gradient: Tensor, info: UpdateInfo, learning_rate: float
    ) -> None:
        """Applies a gradient (count,) to the selected elements; all others keep their values and state."""
        own = {name: selection.take(one) if one.dim() else one for name, one in self._state.items()}
        selected = selection.take(x)
        self._step_with(own, selected, gradient, info, learning_rate)
        selection.put(x, selected)
        for name, one in self._state.items():
            if one.dim():
                selection.put(one, own[name])

    def read(self, worker_id: int, version: int) -> Tensor | None:
        """Call whenever the shard's vector is handed to a worker.

        Returns:
            The vector to send along, live: copy or send it before the next `apply`. None if the rule does not echo.
        """
        return None

    def accepts(self, info: UpdateInfo) -> bool:
        """Whether a gradient computed at `info.version_read` can be applied; if not, drop it and count it as dropped."""
        return True

    def forget(self, worker_id: int) -> None:
        """Discards the error-feedback memory of a worker that has left or restarted."""

    def state(self) -> dict[str, Tensor]:
        """The live tensors of a snapshot. One dimension: a number per element of the shard; none: one for all of it."""
        return dict(self._state)

    def load(self, state: dict[str, Tensor]) -> None:
        """Take over a snapshot's tensors, by copy.

        Raises:
            UsageError: it is of another rule, or of a shard of another size.
        """
        check_fits(state, self._state, WHAT)
        for name, own in self._state.items():
            own.copy_(state[name])

    def reads(self) -> dict[str, Tensor]:
        """The live tensors that `read` stored; a second copy of the shard starts with them, a snapshot omits them."""
        return {}

    def load_reads(self, reads: dict[str, Tensor]) -> None:
        """Take over another's `reads`, after its state."""


@dataclass(frozen=True, kw_only=True)
class SGD(ApplyRule):
    """x <- x - rate g. Costs: no state."""

    is_linear: ClassVar[bool] = True
    moved_vectors: ClassVar[float | None] = 3

    def start(self, num_elements: int, dtype: torch.dtype) -> Applier:
        return Applier(self._step)

    def _step(self, x: Tensor, gradient: Tensor, info: UpdateInfo, rate: float) -> None:
        x.sub_(gradient, alpha=rate)


@dataclass(frozen=True, kw_only=True)
class Momentum(ApplyRule):
    """Heavy ball in torch's form: m <- beta m + g; x <- x - rate m. Costs: one vector of state.

    With many asynchronous workers their staleness already acts like momentum: lower beta as workers are added.

    Args:
        beta: share of the old direction that is kept.
        nesterov: step along g + beta m instead of m.
    """

    beta: Annotated[float, DECAY] = 0.9
    nesterov: bool = False

    is_linear: ClassVar[bool] = True

    @property
    def update_vectors(self) -> float:
        return 11 if self.nesterov else 8

    def start(self, num_elements: int, dtype: torch.dtype) -> Applier:
        return Applier(self._step, momentum=torch.zeros(num_elements, dtype=dtype))

    def _step(self, x: Tensor, gradient: Tensor, info: UpdateInfo, rate: float, momentum: Tensor) -> None:
        momentum.mul_(self.beta).add_(gradient)
        if self.nesterov:
            x.sub_(gradient, alpha=rate)
            x.sub_(momentum, alpha=rate * self.beta)
        else:
            x.sub_(momentum, alpha=rate)


@dataclass(frozen=True, kw_only=True)
class StalenessScaled(ApplyRule):
    """x <- x - (rate / tau) g for a gradient of staleness tau; a fresh one, tau = 0, takes the full rate. No state.

    Not: the step size `inverse` of the shared-memory algorithms, 1 / (tau + 1), which is half of this one at tau = 1.

    Reference: after Zhang et al., "Staleness-aware Async-SGD for Distributed Deep Learning", IJCAI 2016, arXiv:1511.05950.
    """

    is_linear: ClassVar[bool] = True
    moved_vectors: ClassVar[float | None] = 3

    def start(self, num_elements: int, dtype: torch.dtype) -> Applier:
        return Applier(self._step)

    def _step(self, x: Tensor, gradient: Tensor, info: UpdateInfo, rate: float) -> None:
        x.sub_(gradient, alpha=rate / max(1, info.staleness))
