"""The common part of layouts: one worker's shards of a model's parameters, and how they become whole again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from paceline.model_parallel.axes import Axis
from paceline.model_parallel.placement import Placement
from paceline.optim.flat import FlatBinding
from paceline.optim.sharding import EXCHANGED_ELEMENTS, REPLICAS, AxisShape, Shard, Sharding
from paceline.ports.ports import Mailbox
from paceline.ports.rooted import RootedCollectives


class ShardedPart:
    """Replaces a model's parameters by one worker's shards, in place: modules and parameters stay the same objects.

    Subclasses complete it to a `LayoutPart`; they call `_divide` when they are made, and `_connect` when they begin.

    Args:
        model: whole, and the same on all workers.
        axes: by name: first that of the workers that share a model, last `REPLICAS`.

    Attributes:
        whole: the whole model's initial flat vector (W,); released by `begin`.
        binding: of the worker's own vector.
        sharding: how that vector is part of the whole; None: it is all of it.
        along: this worker's exchanges along the axes, by name.
        most_bytes: of one operation along an axis.
    """

    is_recorded = True
    keeps_random_alike = is_placed = False
    mates: Mailbox | None = None
    without_batch: Callable[..., None] | None = None

    def __init__(self, model: nn.Module, axes: Mapping[str, AxisShape], worker_id: int) -> None:
        self.model, self.axes, self.worker_id = model, axes, worker_id
        self.repeats: Callable[[], bool] = bool  # as of `LayoutPart`
        self.along = {
            name: Axis(None, one.size, one.place(worker_id)) for name, one in axes.items() if name != REPLICAS
        }
        self._group, *_ = axes

    def _divide(self, placements: Mapping[nn.Parameter, Placement], *, cut_last: bool = False) -> None:
        """Cuts the parameters.

        Args:
            placements: of all parameters; those that name none are whole on every worker.
            cut_last: whether the shards are the last ones in the worker's vector.

        Raises:
            UsageError: a dimension does not divide; the model is unchanged.
        """
        whole = FlatBinding(self.model.parameters(), on_any_device=True)
        self.whole: Tensor | None = whole.zeros()
        whole.read(self.whole)
        self._placed, self._in_order = placements, whole.parameters
        self._frozen = {one: one.data for one in placements if not one.requires_grad}
        shapes = {one: tuple(one.shape) for one in whole.parameters}
        self._cut(placements)
        own, num_cut = whole.parameters, 0
        if cut_last:
            own = sorted(own, key=lambda one: one in placements)
            num_cut = sum(one in placements for one in own)
        self.binding = binding = FlatBinding(own, on_any_device=True, num_cut=num_cut)
        at = dict(zip(binding.parameters, binding.offsets, strict=True))
        cuts = {one: tuple((dim, self.axes[axis]) for dim, axis in its.cuts) for one, its in placements.items()}
        shards = [
            Shard(offset, at[one], shapes[one], cuts.get(one, ()))
            for one, offset in zip(whole.parameters, whole.offsets, strict=True)
        ]
        within = {name: self.axes[name] for name in self.along}
        parts, sizes = self.axes[self._group].size, (whole.num_elements, binding.num_elements, binding.cut_from)
        self.sharding = Sharding(parts, *sizes, tuple(shards), within) if parts > 1 else None
        self.most_bytes = max(binding.num_elements, EXCHANGED_ELEMENTS) * binding.dtype.itemsize

    def _cut(self, parameters: Iterable[nn.Parameter]) -> None:
        parts = {one: self._placed[one].cut(one.data, self.along) for one in parameters}
        for parameter, part in parts.items():
            if part.shape != parameter.shape:
                parameter.data, parameter.grad = part.clone(memory_format=torch.contiguous_format), None

    def _connect(self, axes: Mapping[str, RootedCollectives]) -> None:
        self.whole = None
        for parameter, whole in self._frozen.items():  # worker 0's values by now
            parameter.data = whole
        self._cut(self._frozen)
        for name, axis in self.along.items():
            self.along[name] = Axis(axes.get(name), axis.size, axis.index, self.most_bytes)

    def agreed(self, number: Callable[[], int]) -> int:
        axis = self.along[self._group]
        found = torch.tensor(0 if axis.index else number(), dtype=torch.float64)
        axis.start_broadcast(found, 0).wait()
        return int(found)

    def whole_of(self, x: Tensor) -> Tensor:
        return x if self.sharding is None else self.sharding.whole_of(self.along[self._group].all_gather(x).view(-1))

    def make_state_whole(self, optimizer: torch.optim.Optimizer) -> None:
        for parameter, placement in self._placed.items():
            state = optimizer.state.get(parameter, {}) if parameter.requires_grad else {}
            for name, value in state.items():
                if isinstance(value, Tensor) and value.dim() and value.shape == parameter.shape:
                    state[name] = placement.gather(value, self.along)

    def make_whole(self) -> None:
        for parameter, placement in self._placed.items():
            if parameter not in self._frozen:
                _put_back(parameter, placement.gather(parameter.data, self.along))
        self._end()

    def take_whole(self, x: Tensor) -> None:
        if self.sharding is not None:
            for parameter, shard in zip(self._in_order, self.sharding.shards, strict=True):
                numel = torch.Size(shard.shape).numel()
                _put_back(parameter, x[shard.whole_at : shard.whole_at + numel].view(shard.shape).clone())
        self._end()

    def _end(self) -> None:
        for parameter, whole in self._frozen.items():
            _put_back(parameter, whole)


def _put_back(parameter: nn.Parameter, whole: Tensor) -> None:
    if parameter.shape != whole.shape:
        parameter.grad = None
    parameter.data = whole
