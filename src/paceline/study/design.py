"""The combinations of levels that become trials, in their order, or as Optuna chooses them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from random import Random
from typing import Any, NamedTuple

from paceline.errors import UsageError
from paceline.specs.bounds import COMBINATIONS, TRIALS
from paceline.specs.text import closest
from paceline.study.parts import Level, Range
from paceline.study.study_file import Study
from paceline.study.trial import Trial, TrialMaker

_DRAWS_PER_TRIAL = 100


class StudyPlan(NamedTuple):
    """The trials of a study, and notes on changes to them."""

    trials: tuple[Trial, ...]
    notes: tuple[str, ...]


def plan_trials(study: Study) -> StudyPlan:
    """All trials of a study whose design does not depend on their results.

    Every seed is a block: all combinations are tried with it, in a random order of their own, before the next seed. So a
    machine that becomes slower during the study slows all methods alike.

    Raises:
        UsageError: a combination cannot be run, or a factor has no effect on any.
    """
    maker = TrialMaker(study)
    trials: dict[str, Trial] = {}
    combinations = _distinct(study, maker)
    for seed in study.seeds:
        block = list(combinations)
        Random(f"{study.design.seed} {seed}").shuffle(block)
        for trial in (one.with_seed(seed) for one in block):
            trials[trial.hash] = trial
    check_all_used(study, maker)
    return StudyPlan(tuple(trials.values()), tuple(maker.notes))


def check_all_used(study: Study, maker: TrialMaker) -> None:
    """Refuse a factor that no combination uses, which is probably misspelt."""
    for name in study.factors:
        if name not in maker.applied:
            head, _, field = name.partition(".")
            raise UsageError(
                f"[factors] '{name}' has no effect: no {head} of this study has a field '{field}'."
                f"{closest(name, maker.applied)} `paceline algorithms` lists the fields of each."
            )


def _distinct(study: Study, maker: TrialMaker) -> list[Trial]:
    """The distinct combinations, with the first seed; fields that an algorithm lacks do not distinguish them."""
    found: dict[str, Trial] = {}
    wanted = study.design.trials
    # Several combinations can be the same trial.
    possible = math.prod(math.inf if isinstance(one, Range) else len(one) for one in study.factors.values())
    if study.design.kind == "grid":
        COMBINATIONS.check("The number of combinations of all levels", possible)
    seen: set[tuple[Level, ...]] = set()
    for number, levels in enumerate(_combinations(study)):
        if (words := tuple(levels.values())) not in seen:
            seen.add(words)
            trial = maker.make(levels, study.seeds[0])
            found.setdefault(trial.hash, trial)
        if wanted is not None and (len(found) == wanted or number >= wanted * _DRAWS_PER_TRIAL):
            break
        if len(found) * len(study.seeds) > TRIALS.most:
            raise UsageError(f"The study has more than {TRIALS.most:,} trials; try fewer levels, or a random design.")
        if len(seen) == possible:
            break
    return list(found.values())


def _combinations(study: Study) -> Iterator[dict[str, Level]]:
    match study.design.kind:
        case "grid":
            listed = [levels for levels in study.factors.values() if not isinstance(levels, Range)]
            yield from (dict(zip(study.factors, one, strict=True)) for one in itertools.product(*listed))
        case "one-at-a-time":
            yield study.centre
            for name, levels in study.factors.items():
                if not isinstance(levels, Range):
                    yield from ({**study.centre, name: level} for level in levels if level != study.centre[name])
        case _:
            random = Random(study.design.seed)
            while True:
                yield {
                    name: levels.draw(random) if isinstance(levels, Range) else random.choice(levels)
                    for name, levels in study.factors.items()
                }


def search(study: Study, measure: Callable[[list[Trial]], float | None]) -> Iterator[Trial]:
    """The trials that Optuna chooses, combination by combination; run each one before you ask for the next.

    The sampler is seeded, so it repeats its choices if it gets the same measures: a resumed study goes through its finished
    trials first, without running them. A combination without a measure (a target that was not reached, a divergence) counts
    as infinitely bad.

    Args:
        study: whose design has a number of trials, a measure and a goal.
        measure: the measure of a combination's trials, one for each seed; None: there is none.
    """
    try:
        import optuna
    except ImportError as error:
        raise UsageError(
            "An optuna design needs Optuna, which is not installed: pip install 'paceline[optuna]'."
        ) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    design, maker = study.design, TrialMaker(study)
    maker.make(study.centre, study.seeds[0])  # rejects an impossible combination before the first run
    sampler = optuna.create_study(direction=design.goal, sampler=optuna.samplers.TPESampler(seed=design.seed))

    def chosen() -> Iterator[Trial]:
        worst = math.inf if design.goal == "minimize" else -math.inf
        for _ in range(design.trials or 0):
            asked = sampler.ask()
            levels = {name: _suggested(asked, name, levels) for name, levels in study.factors.items()}
            trial = maker.make(levels, study.seeds[0])
            trials = [trial.with_seed(seed) for seed in study.seeds]
            yield from trials
            value = measure(trials)
            sampler.tell(asked, worst if value is None else value)
        check_all_used(study, maker)

    return chosen()


def _suggested(asked: Any, name: str, levels: tuple[Level, ...] | Range) -> Level:
    if not isinstance(levels, Range):
        return asked.suggest_categorical(name, list(levels))
    suggest = asked.suggest_int if levels.whole else asked.suggest_float
    return suggest(name, levels.low, levels.high, log=levels.log)
