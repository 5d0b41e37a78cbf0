"""Random numbers that are a function of their position in the whole tensor, and so independent of the mesh.

PyTorch's own depend on the layout (pytorch#168058). These are SplitMix64 of a counter, one stream for each use.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15  # SplitMix64's increment and multipliers
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_DIGITS = 53  # of a float64


def uniform_part(
    seed: Sequence[int], whole: Sequence[int], first: Sequence[int], shape: Sequence[int], device: torch.device
) -> Tensor:
    """Part of a tensor of numbers in [0, 1), in float64: `shape` elements from index `first` on of shape `whole`."""
    return _uniform(_places(whole, first, shape, device), seed)


def normal_part(seed: Sequence[int], whole: Sequence[int], first: Sequence[int], shape: Sequence[int]) -> Tensor:
    """Part of a tensor of standard normal numbers, in float64, by Box and Muller's formula; arguments as `uniform_part`."""
    places = 2 * _places(whole, first, shape, None)
    length = (-2 * torch.log1p(-_uniform(places, seed))).sqrt()
    return length * torch.cos(2 * math.pi * _uniform(places + 1, seed))


def dropout_part(
    x: Tensor, seed: Sequence[int], whole: Sequence[int], first: Sequence[int], probability: float
) -> Tensor:
    """Dropout of a part of a tensor; the mask depends only on the seed and the position in the whole tensor."""
    if probability >= 1.0:
        return x * 0.0
    return x * (uniform_part(seed, whole, first, x.shape, x.device) >= probability) / (1.0 - probability)


def _places(whole: Sequence[int], first: Sequence[int], shape: Sequence[int], device: torch.device | None) -> Tensor:
    """Each element's position in the whole tensor, as one row."""
    places = torch.zeros((), dtype=torch.int64, device=device)
    for size, begin, length in zip(whole, first, shape, strict=True):
        places = places[..., None] * size + torch.arange(begin, begin + length, device=device)
    return places


def _uniform(counters: Tensor, seed: Sequence[int]) -> Tensor:
    key = 0
    for number in seed:
        key = _mixed_int((key + number + 1) * _STEP & _MASK)
    x = counters * _signed(_STEP) + _signed(key)
    x = (x ^ _shifted(x, 30)) * _signed(_FIRST)
    x = (x ^ _shifted(x, 27)) * _signed(_SECOND)
    x = x ^ _shifted(x, 31)
    return _shifted(x, 64 - _DIGITS).to(torch.float64) * 2.0**-_DIGITS


def _shifted(x: Tensor, places: int) -> Tensor:
    return (x >> places) & ((1 << (64 - places)) - 1)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


def _mixed_int(x: int) -> int:
    x = (x ^ x >> 30) * _FIRST & _MASK
    x = (x ^ x >> 27) * _SECOND & _MASK
    return x ^ x >> 31
