"""Designs that Optuna chooses: it is asked for a combination, and told what that has measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from paceline.errors import UsageError
from paceline.study.design import check_all_used
from paceline.study.levels import Level, Range
from paceline.study.study_file import Study
from paceline.study.trial import Trial, TrialMaker

__all__ = ["search"]


def search(study: Study, measure: Callable[[list[Trial]], float | None]) -> Iterator[Trial]:
    """The trials of one combination after the other; each must have been run before the next is asked for.

    The sampler is seeded, so it asks the same as before when it is told the same as before: a study that is resumed goes
    through its finished trials first, without running them. A combination that has no measure (a target that was not reached,
    a divergence) is told as infinitely bad.

    Args:
        study: whose design has a number of trials, a measure and a goal.
        measure: the measure of a combination's trials, one for each seed; None: there is none.
    """
    optuna = _optuna()
    design, maker = study.design, TrialMaker(study)
    maker.make(study.centre, study.seeds[0])  # refuses an impossible combination before the first run
    asked = optuna.create_study(direction=design.goal, sampler=optuna.samplers.TPESampler(seed=design.seed))
    return _asked(asked, study, maker, measure)


def _asked(
    asked: Any, study: Study, maker: TrialMaker, measure: Callable[[list[Trial]], float | None]
) -> Iterator[Trial]:
    worst = math.inf if study.design.goal == "minimize" else -math.inf
    for _ in range(study.design.trials or 0):
        question = asked.ask()
        levels = {name: _suggested(question, name, levels) for name, levels in study.factors.items()}
        trial = maker.make(levels, study.seeds[0])
        trials = [trial.with_seed(seed) for seed in study.seeds]
        yield from trials
        value = measure(trials)
        asked.tell(question, worst if value is None else value)
    check_all_used(study, maker)


def _optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise UsageError(
            "An optuna design needs Optuna, which is not installed: pip install 'paceline[optuna]'."
        ) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _suggested(question: Any, name: str, levels: tuple[Level, ...] | Range) -> Level:
    if not isinstance(levels, Range):
        return question.suggest_categorical(name, list(levels))
    suggest = question.suggest_int if levels.whole else question.suggest_float
    return suggest(name, levels.low, levels.high, log=levels.log)
