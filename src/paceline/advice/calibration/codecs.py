"""Encoding and decoding speed of one core of this machine: `[codecs]` in the file of `paceline calibrate`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.advice.calibration.measurements import rounded
from paceline.compression.codec import Codec
from paceline.compression.registry import codec_registry, probed_codecs
from paceline.system.machine import intra_op_threads

NUM_ELEMENTS = 2**19  # 2 MB of float32: about a bucket of a gradient, and more than the caches next to a core
_LEAST = 3  # repetitions; the first, which compiles, is not counted


class CodecRate(NamedTuple):
    """Bytes of a float32 vector per second."""

    encode_bytes_per_s: float
    decode_bytes_per_s: float


def measure_codecs(
    for_s: float, *, num_elements: int = NUM_ELEMENTS, now_s: Callable[[], float] = time.perf_counter
) -> dict[str, CodecRate]:
    """Medians for each codec with default arguments, encoding and decoding a vector of normal numbers in one thread.

    Measures each for `for_s`, and at least three times. `power` is left out: its time depends on the shapes of the matrices.
    """
    gradient = torch.randn(num_elements, generator=torch.Generator().manual_seed(0))
    with intra_op_threads(1), torch.no_grad():
        return {name: _rate(codec_registry.build(name), gradient, for_s, now_s) for name in probed_codecs()}


def codec_table(rates: Mapping[str, CodecRate]) -> tuple[tuple[str, float, float], ...]:
    """`Cluster.codecs`."""
    return tuple((name, rounded(rates[name][0]), rounded(rates[name][1])) for name in sorted(rates))


def _rate(codec: Codec, gradient: Tensor, for_s: float, now_s: Callable[[], float]) -> CodecRate:
    tuner, memory = codec.tuner(), codec.start(len(gradient), gradient.dtype)
    encode_s: list[float] = []
    decode_s: list[float] = []
    until_s = now_s() + for_s
    while len(encode_s) < _LEAST or now_s() < until_s:
        begun_s = now_s()
        if tuner.wants_size:
            tuner.fit(tuner.size_of(gradient))
        encoded = tuner.codec.encode(gradient, memory, len(encode_s))
        coded_s = now_s()
        tuner.codec.decode(encoded, len(gradient), gradient.dtype)
        encode_s.append(coded_s - begun_s)
        decode_s.append(now_s() - coded_s)
    return CodecRate(*(gradient.nbytes / statistics.median(times_s[1:]) for times_s in (encode_s, decode_s)))
