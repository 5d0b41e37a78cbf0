"""Messages between workers that calibrate together: plain data, checked when it is read.

Every function parses an incoming message and raises ValueError if no worker of this version sends it.
"""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

from paceline.advice.calibration.cluster_file import MeasuredWorker
from paceline.advice.calibration.codecs import CodecRate
from paceline.advice.calibration.measurements import MemoryTimes, Quartiles
from paceline.compression.registry import probed_codecs

__all__ = ["codec_rates", "hello", "machine_numbers", "measured_worker", "memory", "round_trips"]

_MOST = 1e15  # seconds

Trips = list[tuple[int, dict[int, list[float]]]]


def hello(words: Any) -> dict[str, str]:
    """A worker's machine, and its arguments."""
    return {name: _of(str, words, name) for name in ("machine", "asked")}


def machine_numbers(words: Any, num_workers: int) -> list[int]:
    """Each worker's machine, 0, 1, ..."""
    numbers = [_whole(one, most=num_workers - 1) for one in _is(list, words)]
    if len(numbers) != num_workers:
        raise ValueError(f"{len(numbers)} machines of {num_workers} workers")
    return numbers


def measured_worker(words: Any) -> MeasuredWorker:
    """A worker's own steps; its machine's number and memory are not known yet."""
    times_s = _of(dict, words, "compute_s")
    return MeasuredWorker(
        machine=-1,
        host=_of(str, words, "host"),
        about=_of(dict, words, "about"),
        compute_s={_size(size): _quartiles(one, least=0.0) for size, one in times_s.items()},
        steps_s=_numbers(_of(list, words, "steps_s")),
        update_s=_quartiles(_of(dict, words, "update_s"), least=0.0),
        memory=None,
    )


def memory(words: Any) -> MemoryTimes | None:
    """A machine's memory times; None from a worker that did not measure them."""
    if words is None:
        return None
    crowded_s = [_quartiles(one, least=0.0) for one in _of(list, words, "crowded_copies_s")]
    if not crowded_s:
        raise ValueError("no copies")
    copy_s, atomic_s, wake_s = (_of(dict, words, name) for name in ("copy_s", "atomic_s", "wake_s"))
    return MemoryTimes(_quartiles(copy_s, least=0.0), crowded_s, _quartiles(atomic_s), _quartiles(wake_s))


def codec_rates(words: Any) -> dict[str, CodecRate]:
    """By codec, bytes that one core encodes and decodes per second; empty from a worker that did not measure it."""
    found = {}
    for name, rates in _is(dict, words).items():
        if name not in probed_codecs() or len(_is(list, rates)) != 2:
            raise ValueError(f"{name!r}: {rates!r} of a codec")
        found[name] = CodecRate(*(_number(rate, least=0.0) for rate in rates))
    return found


def round_trips(words: Any, worker_id: int, num_workers: int) -> Trips:
    """Round trips by peer, each above `worker_id`, and by message bytes."""
    found = []
    for pair in _is(list, words):
        if len(_is(list, pair)) != 2:
            raise ValueError(f"{len(pair)} words of a pair")
        by_size = {_size(size): _numbers(_is(list, times_s)) for size, times_s in _is(dict, pair[1]).items()}
        found.append((_whole(pair[0], least=worker_id + 1, most=num_workers - 1), by_size))
    return found


def _quartiles(words: Any, least: float = -math.inf) -> Quartiles:
    if _is(dict, words).keys() != {one.name for one in fields(Quartiles)}:
        raise ValueError(f"{sorted(words)} of a spread")
    median, low, high = (_number(words[name], least) for name in ("median", "low", "high"))
    return Quartiles(median, low, high, _whole(words["count"], least=1))


def _numbers(words: list[Any]) -> list[float]:
    if not words:
        raise ValueError("no times")
    return [_number(one, least=0.0) for one in words]


def _number(value: Any, least: float) -> float:
    """A finite number above `least`."""
    if type(value) not in (int, float) or not (least < value and abs(value) < _MOST):
        raise ValueError(f"{value!r} where a number is expected")
    return float(value)


def _whole(value: Any, least: int = 0, most: int = 1 << 53) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{value!r} where {least} to {most} is expected")
    return value


def _size(word: str) -> int:
    if not (word.isascii() and word.isdecimal() and len(word) < 16):
        raise ValueError(f"{word!r} where a size is expected")
    return _whole(int(word), least=1)


def _of(kind: type, words: Any, name: str) -> Any:
    if name not in _is(dict, words):
        raise ValueError(f"no {name}")
    return _is(kind, words[name])


def _is(kind: type, value: Any) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"{type(value).__name__} where {kind.__name__} is expected")
    return value
