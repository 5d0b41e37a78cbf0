"""Chooses a layout for a model: which layers can be cut, how long they take at the local shapes, and what is fastest."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.model_parallel.hybrid.layout import HybridParallel
from paceline.model_parallel.hybrid.plan import check_called, cuttable_chains, plan_cuts
from paceline.model_parallel.layers import model_layers
from paceline.planner.balance import Layer
from paceline.planner.layout_choice import Candidate, LayoutChoice, choose_layouts

FLOPS_PER_S = 1e10  # of one core's convolutions
_LATENCY_S, _BANDWIDTH_BYTES_PER_S = 50e-6, 1.25e9  # 10 Gbit/s Ethernet
_REPEATS = 3


def candidates_of(model: nn.Module, inputs: Tensor, layout: HybridParallel | None = None) -> list[Candidate]:
    """The model's convolutions and linear layers in the order of the forward pass; the layout decides which may be cut."""
    chains = cuttable_chains(model, layout or HybridParallel())
    first = {chain[0] for chain in chains}
    inner = {name for chain in chains for name in chain}
    return [
        Candidate(layer=layer, can_cut=layer.name in inner and layer.out_size == 1, follows=layer.name in inner - first)
        for layer in model_layers(model, inputs)
    ]


def measured_s(flops_per_s: float) -> Callable[[Layer, float], float]:
    """Seconds of a layer: a linear one is measured here, at its local shape; a convolution's follow from its operations."""

    @cache
    def linear_s(ifm: int, ofm: int, rows: int) -> float:
        x, weight, gradient = torch.ones(rows, ifm), torch.ones(ofm, ifm), torch.ones(rows, ofm)
        times = []
        for _ in range(_REPEATS):
            begun_s = time.perf_counter()
            torch.mm(x, weight.t())
            torch.mm(gradient, weight)
            torch.mm(gradient.t(), x)
            times.append(time.perf_counter() - begun_s)
        return min(times)

    def layer_s(layer: Layer, points: float) -> float:
        if layer.kernel == layer.in_size == layer.out_size == 1:
            return linear_s(layer.ifm, layer.ofm, max(1, round(points)))
        return layer.operations(points) / flops_per_s

    return layer_s


def counted_s(layer: Layer, points: float) -> float:
    """Seconds of a layer from its operations: the same on every worker, unlike measurements."""
    return layer.operations(points) / FLOPS_PER_S


def layout_for(choice: LayoutChoice, layout: HybridParallel | None = None) -> HybridParallel:
    """The layout that a choice describes."""
    base = layout or HybridParallel()
    if not choice.cut:
        return replace(base, groups=choice.groups)
    return replace(base, groups=choice.groups, pairing=choice.pairing, layers="-".join(choice.cut))


def chosen_layout(
    layout: HybridParallel,
    model: nn.Module,
    inputs: Tensor,
    *,
    workers: int,
    batch_size: int,
    compute_s: Callable[[Layer, float], float] | None = None,
) -> HybridParallel:
    """A layout with its groups chosen, for its own pairing; a layout with given groups is returned unchanged.

    `batch_size` is that of each worker; `compute_s` is `counted_s`, or as `measured_s` returns it, and measures by default.
    """
    if layout.groups != "auto":
        return layout
    candidates = candidates_of(model, inputs, layout)
    if not any(one.can_cut for one in candidates):
        raise UsageError(
            "No linear layer of the model can be cut, so there are no groups to choose: train without a layout."
        )
    best = choose_layouts(
        candidates,
        nodes=workers,
        batch=workers * batch_size,
        latency_s=_LATENCY_S,
        bytes_per_s=_BANDWIDTH_BYTES_PER_S,
        compute_s=compute_s or measured_s(FLOPS_PER_S),
        pairings=(layout.pairing,),
    )[0]
    return layout_for(best, layout)


def checked_layout(
    layout: HybridParallel, model: nn.Module, inputs: Tensor | None, *, workers: int, **of_choice: Any
) -> HybridParallel:
    """The layout with its groups chosen, if it can cut the model; `inputs` and `of_choice` are as in `chosen_layout`.

    Raises:
        UsageError: it cannot, or `inputs` are None and its groups are to be chosen.
    """
    if inputs is not None:
        layout = chosen_layout(layout, model, inputs, workers=workers, **of_choice)
    plan = plan_cuts(model, layout, workers)
    if inputs is not None:
        check_called(plan, model, inputs)
    return layout
