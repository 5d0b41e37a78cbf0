"""Factors on a gradient by its staleness or by its worker's time, as their papers have them."""

from statistics import median


def inverse(staleness, earlier):
    """1 / (staleness + 1): Zhang et al. 2015, with one more in the denominator."""
    return 1 / (staleness + 1)


def exponential(threshold):
    """exp(-beta staleness) with beta = (2 / t) ln(1 + t / 2): AdaSGD of FLeet, Damaskinos et al. 2020."""
    return lambda staleness, earlier: (1 + threshold / 2) ** (-2 / threshold * staleness)


def tail(amplitude, workers):
    """1 + A (1 - 2 F(staleness)), F: the share of earlier updates that were less stale: TAIL-tau, Bäckström et al. 2022.

    1 before the first 10 updates of every worker.
    """

    def factor(staleness, earlier):
        if len(earlier) < 10 * workers:
            return 1.0
        return 1 + amplitude * (1 - 2 * sum(one < staleness for one in earlier) / len(earlier))

    return factor


def rescaled(trips):
    """t_i (1/n) sum_j 1 / t_j of the worker whose gradient makes an update: Rescaled ASGD, 2026.

    t_i is the median of a worker's newest 50 round trips but its first, known once there are three; until then a factor is 1.
    Workers that have left are not counted.

    Args:
        trips: worker and seconds of the round trip that each gradient ends, in the order of versions; None: it has left.
    """
    factors, own = [1.0], {}
    for worker, seconds in trips:
        if seconds is None:
            own.pop(worker, None)
            continue
        own.setdefault(worker, []).append(seconds)
        times = {one: median(found[1:][-50:]) for one, found in own.items() if len(found) > 3}
        factors.append(times[worker] * sum(1 / t for t in times.values()) / len(times) if worker in times else 1.0)
    return lambda steps: factors[steps[0].applied]
