"""Durations and rates as people write them: `90`, `90s`, `5m`, `2h`; `1/h`, `0.5/min`."""

from __future__ import annotations

import math
import re

from paceline.errors import UsageError, shown
from paceline.specs.bounds import DEATHS_PER_S, SECONDS_ABOVE_0

_UNITS_S = {"ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?) ?([a-z]*)")


def seconds(text: str, option: str) -> float:
    """The seconds of `90`, `90s`, `5m`, `5min`, `2h` or `1d`.

    Raises:
        UsageError: it is none of these, or not above 0; the message names the option.
    """
    match = _DURATION.fullmatch(text.strip().lower())
    unit_s = _UNITS_S.get(match[2] or "s") if match else None
    value_s = float(match[1]) * unit_s if match and unit_s else 0.0
    if not 0 < value_s < math.inf:
        raise UsageError(f"{option} must be a duration above 0, such as 90, 90s, 5m or 2h, not {shown(text)}.")
    SECONDS_ABOVE_0.check(f"{option} {text}, in seconds,", value_s)
    return value_s


def per_second(text: str, option: str) -> float:
    """The rate of `1/h`, `2/d`, `0.5/min` or `0.1/s`, per second; 0 is never.

    Raises:
        UsageError: it is none of these; the message names the option.
    """
    count, slash, unit = (part.strip() for part in text.lower().partition("/"))
    try:
        value = float(count) if slash or count == "0" else math.nan
    except ValueError:
        value = math.nan
    unit_s = _UNITS_S.get(unit, math.nan) if slash else 1.0
    rate = value / unit_s
    if not 0 <= rate < math.inf:
        raise UsageError(f"{option} must be a rate, such as 1/h, 2/d or 0.5/min, not {shown(text)}.")
    DEATHS_PER_S.check(f"{option} {text}, per second,", rate)
    return rate
