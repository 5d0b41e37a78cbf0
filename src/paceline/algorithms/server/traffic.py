"""Measure how much memory a server's rule reads and writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.algorithms.server.apply import ApplyRule
from paceline.algorithms.server.delayed import Delayed
from paceline.algorithms.server.update import UpdateInfo
from paceline.algorithms.server.user import UserOptimizer

__all__ = ["TrafficCount", "update_vectors"]

_WRITE_ONLY = {"copy_", "zero_", "fill_", "_foreach_copy_", "_foreach_zero_"}  # do not read their output
_TOUCH_NOTHING = ("empty", "new_empty")
_NUM_ELEMENTS = 4096


class TrafficCount(TorchDispatchMode):
    """Counts the bytes of all tensors that operations read and write inside its `with`.

    A tensor passed twice counts once; views cost nothing. Temporary memory inside an operation is invisible, so the count is a
    lower bound.

    Args:
        counts: called for each operation that reads or writes; returns whether it counts. None: all do.

    Attributes:
        num_bytes: so far.
    """

    def __init__(self, counts: Callable[[], bool] | None = None) -> None:
        super().__init__()
        self._counts = counts
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Carries an operation out."""
        returned = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if name.startswith(_TOUCH_NOTHING) or (self._counts is not None and not self._counts()):
            return returned
        given = [(one, None) for one in func._schema.arguments[: len(args)]]
        given = [(schema, value) for (schema, _), value in zip(given, args, strict=True)]
        by_name = {one.name: one for one in func._schema.arguments}
        given += [(by_name[key], value) for key, value in (kwargs or {}).items()]
        read: dict[int, int] = {}
        written: dict[int, int] = {}
        for schema, value in given:
            writes = schema.alias_info is not None and schema.alias_info.is_write
            for tensor in _tensors(value):
                if writes:
                    written[tensor.data_ptr()] = tensor.nbytes
                if not writes or (schema.name != "out" and name not in _WRITE_ONLY):
                    read[tensor.data_ptr()] = tensor.nbytes
        if not written:
            if any(one.alias_info is not None for one in func._schema.returns):
                return returned  # a view
            written = {tensor.data_ptr(): tensor.nbytes for tensor in _tensors(returned)}
        self.num_bytes += sum(read.values()) + sum(written.values())
        return returned


def update_vectors(rule: ApplyRule | None, optimizer_vectors: float) -> float:
    """The number of shard-length vectors that one update by this rule reads plus writes.

    Args:
        rule: any; None: there are no servers.
        optimizer_vectors: the same number for the workers' own optimizer, which is unknown here.
    """
    if rule is None or isinstance(rule, UserOptimizer):
        return optimizer_vectors
    if isinstance(rule, Delayed):  # a copy of each gradient waits
        return update_vectors(rule.rule, optimizer_vectors) + 2.0 * (1 + rule.echoes)
    applier = rule.start(_NUM_ELEMENTS, torch.float32)
    x, gradient = torch.ones(_NUM_ELEMENTS), torch.ones(_NUM_ELEMENTS)
    for sequence in (1, 2):  # the first may make the state
        echo = applier.read(0, sequence)
        echo = None if echo is None else echo.clone()
        about = UpdateInfo(
            worker_id=0, sequence=sequence, step=0, version_read=sequence, version=sequence, num_samples=1
        )
        with TrafficCount() as count:
            applier.apply(x, gradient, about, 1e-3, echo)
    return count.num_bytes / x.nbytes


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)
