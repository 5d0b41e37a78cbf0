"""Advice that nobody has computed: times follow from speeds, so that tests can say what must be shown."""

import math

from paceline.advice.answer import Advice, Candidate, Circumstances, Fit, Measured, Prediction, Target
from paceline.planner.estimate import Estimate

SPECS = (
    "leashed", "hogwild", "locked(kind=rwlock)", "lockstep", "all-reduce", "local-sgd(period=8)",
    "parameter-server(mode=sync(backups=1))",
)  # fmt: skip
INTERVALS = (0.8, 1.25)


def about(value, *, high=None):
    """An estimate with low and high 0.8 and 1.25 times the value."""
    low, above = INTERVALS
    return Estimate(value=value, low=low * value, high=above * value if high is None else high)


def loss_after(samples):
    """2.3 at first, an eighth of that after 80,000 samples."""
    return 2.3 * math.exp(-samples / 40_000)


def shape(value, target):
    """A loss as the target's measure."""
    return value if target.accuracy is None else 1 - 0.4 * value


def prediction(place, workers, target, *, reached=True):
    """The candidate `place` of `SPECS`: each needs a fifth more samples than the one before."""
    samples_per_s = 10_000 * workers**0.8
    slower = 1 + 0.2 * place
    needed = 120_000 * slower
    time_s = needed / samples_per_s
    ends = [time_s * share for share in (0.02, 0.1, 0.3, 0.6, 1.0, 1.6)]
    curve = tuple((at, shape(loss_after(at * samples_per_s / slower), target)) for at in ends)
    late = None if target.deadline_s is None else shape(loss_after(target.deadline_s * samples_per_s / slower), target)
    return Prediction(
        candidate=Candidate(algorithm=SPECS[place], workers=workers),
        time_s=about(time_s) if reached else None,
        why_not="" if reached else "diverged in 2 of 2 simulations",
        at_deadline=None if late is None else about(late),
        samples_per_s=about(samples_per_s),
        samples_to_target=about(needed) if reached else None,
        simulated_s=(0.97 * time_s, 1.02 * time_s) if reached else (math.inf, math.inf),
        modelled_s=about(1.1 * time_s) if reached else None,
        staleness=None if place in (3, 4) else workers - 1.0,
        curve=curve if reached else (),
        extrapolation="more workers than the 2 that were measured" if workers > 2 else "",
    )


def made_up(target=None, *, arrive=True, circumstances=None):
    """Advice on seven algorithms with 1, 2 and 4 workers; that of the last with 4 diverges."""
    target = target or Target(accuracy=0.96)
    every = [(place, m) for place in range(len(SPECS)) for m in (1, 2, 4)]
    found = [prediction(place, m, target, reached=arrive and (place, m) != (6, 4)) for place, m in every]
    found.sort(key=lambda one: one.time_s.value if one.time_s else math.inf)
    measured = tuple(
        Measured(
            candidate=one.candidate,
            samples_per_s=one.samples_per_s,
            curve=tuple((at, value * 1.01) for at, value in one.curve[:4]),
        )
        for one in found
        if one.candidate.workers <= 2
    )
    first = found[0].candidate
    return Advice(
        program="train.py:train",
        target=target,
        circumstances=circumstances or Circumstances(),
        ranked=tuple(found),
        measured=measured,
        fits=tuple(Fit(algorithm=one, leave_one_out={1: 0.05, 2: 0.02}, step_error=0.08) for one in SPECS[:3]),
        reasons=(
            f"{first.algorithm} makes the most of {first.workers} workers: 30,314 samples/s.",
            "It needs 120,000 samples, as few as any other.",
            "No worker waits for another.",
        )
        if arrive
        else ("all of them diverged.",),
        not_tried=("d-psgd: it needs 3 workers or more to differ from all-reduce.",),
        warnings=("The first two are closer than their intervals: measure both.",),
        command=f'paceline train --task train.py:train --algorithm "{first.algorithm}" --workers {first.workers}'
        if arrive
        else "",
        took_s=61.5,
        machine={"processor": "made up", "cores": 2, "memory_gib": 8.0, "system": "Linux 6"},
    )
