"""Numbers, times, shares and lists as text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

ABSENT = "\N{EN DASH}"  # in place of a missing figure
SECONDS_IN = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}


def joined(parts: Sequence[str]) -> str:
    """A list in a sentence.

    >>> joined(["a"]), joined(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def few(names: Sequence[str]) -> str:
    """The first three of many in a sentence.

    >>> few(["a", "b", "c", "d", "e"])
    'a, b, c and 2 more'
    """
    return joined([*names[:3], f"{len(names) - 3} more"] if len(names) > 3 else names)


def counted(number: int, noun: str) -> str:
    """`1 pair`, `2 pairs`."""
    return f"{number} {noun}{'s' if number != 1 else ''}"


def workers_text(num_workers: int) -> str:
    """`1 worker`, `2 workers`."""
    return counted(num_workers, "worker")


def capital(text: str) -> str:
    """The text with its first letter in upper case."""
    return text[:1].upper() + text[1:]


def seconds_text(seconds: float) -> str:
    """A duration for prose.

    >>> [seconds_text(value) for value in (0.0123, 1.234, 99.96, 754, 7000)]
    ['12.3 ms', '1.23 s', '100 s', '12.6 min', '1.94 h']
    """
    unit = "ms" if seconds < 0.9995 else "s" if seconds < 600 else "min" if seconds < 5400 else "h"
    return f"{number_text(seconds / SECONDS_IN[unit])} {unit}"


def column_unit(values_s: Iterable[float]) -> str:
    """The unit for a column of times, chosen by the shortest."""
    least_s = min((value for value in values_s if 0 < value < math.inf), default=1.0)
    return "ms" if least_s < 0.02 else "s" if least_s < 1200 else "min" if least_s < 7200 else "h"


def number_text(value: float | None, digits: int = 3) -> str:
    """About `digits` significant digits, thousands separated, never in exponent notation below a billion.

    >>> [number_text(value) for value in (0.012345, 1.5, 123.456, 22232.39, 1.5e10, 0)]
    ['0.0123', '1.50', '123', '22,232', '1.50e10', '0']
    """
    if value is None:
        return ABSENT
    if isinstance(value, int) or value == 0:
        return f"{value:,.0f}"
    magnitude = math.floor(math.log10(abs(value)))
    if not -5 <= magnitude < 9:
        return f"{value:.{digits - 1}e}".replace("e+0", "e").replace("e+", "e")
    decimals = max(0, digits - 1 - magnitude)
    if round(abs(value), decimals) >= 10.0 ** (magnitude + 1):  # 9.996 is 10.0, not 10.00
        decimals = max(0, decimals - 1)
    return f"{value:,.{decimals}f}"


def span_text(low: float, high: float, text: Callable[[float], str] = number_text) -> str:
    """An interval: `1.10 to 1.40`; `1.10 or more` without an upper end."""
    return f"{text(low)} or more" if math.isinf(high) else f"{text(low)} to {text(high)}"


def percent_text(share: float | None) -> str:
    """A share as a percentage.

    >>> [percent_text(value) for value in (0.0012, 0.034, 0.5, 1, 0, 0.9512)]
    ['0.1 %', '3.4 %', '50.0 %', '100 %', '0 %', '95.1 %']
    """
    if share is None:
        return ABSENT
    return whole_percent_text(share) if share in (0, 1) else f"{100 * share:.1f} %"


def whole_percent_text(share: float) -> str:
    """`95 %`."""
    return f"{100 * share:.0f} %"
