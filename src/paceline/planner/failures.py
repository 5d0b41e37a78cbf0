"""How much longer training takes when workers are killed, after Young and Daly.

A method that needs every worker repeats each checkpoint interval until it succeeds. A method that continues without a worker
loses that worker's share while it is away. Kills are independent and come at a constant rate, also during a restart.

Reference: Young, "A First Order Approximation to the Optimum Checkpoint Interval", 1974; Daly, "A Higher Order Estimate of
        the
    Optimum Checkpoint Interval for Restart Dumps", Future Generation Computer Systems 22, 2006, equations 13 and 20.
"""

from __future__ import annotations

import math

_LARGEST = 700.0  # exp overflows above


def expected_s(work_s: float, *, kills_per_s: float, interval_s: float, restart_s: float) -> float:
    """Expected seconds for an amount of work, if a kill costs a restart and everything since the last checkpoint.

    With M = 1 / kills_per_s, each interval of length t takes M e^(R / M) (e^(t / M) - 1); the last one has the length of the
    remaining work. Daly's equation 13 has W / t such intervals. Checkpoints take no time.

    >>> round(expected_s(100.0, kills_per_s=0.01, interval_s=10.0, restart_s=5.0), 1)
    110.6

    Args:
        work_s: W, without kills.
        kills_per_s: of all workers together, above 0.
        interval_s: work between two checkpoints.
        restart_s: R, from a kill until the work continues.
    """
    whole = max(0, math.ceil(work_s / interval_s - 1e-9) - 1)
    attempts = [(whole, interval_s), (1, work_s - whole * interval_s)]
    if any(kills_per_s * (restart_s + length_s) > _LARGEST for number, length_s in attempts if number):
        return math.inf
    return sum(
        number * math.exp(kills_per_s * restart_s) * math.expm1(kills_per_s * length_s) / kills_per_s
        for number, length_s in attempts
        if number
    )


def availability(*, kills_per_s: float, restart_s: float) -> float:
    """Share of the time that a worker is present: it lives 1 / kills_per_s on average, and is then away for `restart_s`.

    >>> availability(kills_per_s=0.01, restart_s=25.0)
    0.8

    Args:
        kills_per_s: of this worker while it lives.
        restart_s: until it is back.
    """
    return 1 / (1 + kills_per_s * restart_s)
