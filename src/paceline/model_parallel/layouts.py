"""All layouts: how a model is divided among workers, in addition to the algorithm. A layout can be written as a spec."""

from __future__ import annotations

from functools import partial
from typing import Any

from paceline.algorithms import Algorithm
from paceline.model_parallel.hybrid import worker_part as hybrid
from paceline.model_parallel.hybrid.layout import HybridParallel
from paceline.model_parallel.tensor import worker_part as tensor
from paceline.model_parallel.tensor.layout import TensorParallel
from paceline.specs.registry import Registry
from paceline.worker.memberships.layout_part import Division

AnyLayout = HybridParallel | TensorParallel

layout_registry = Registry("layout")
layout_registry.register("hybrid", HybridParallel)
layout_registry.register("tensor", TensorParallel)
_MODULES: dict[type, Any] = {HybridParallel: hybrid, TensorParallel: tensor}


def layout_of(layout: AnyLayout | str) -> AnyLayout:
    """A layout, from its spec if it is text.

    >>> layout_of("tensor(q=2, depth=3)").shape
    Grid(q=2, depth=3)
    """
    return layout_registry.build(layout) if isinstance(layout, str) else layout


def check_layout(layout: AnyLayout, algorithm: Algorithm) -> None:
    """Rejects an algorithm that does not work with a layout."""
    _MODULES[type(layout)].check_algorithm(algorithm)


def division_of(layout: AnyLayout) -> Division:
    """Divides a model by a layout."""
    return Division(layout_registry.spec(layout), partial(_MODULES[type(layout)].WorkerPart, layout))
