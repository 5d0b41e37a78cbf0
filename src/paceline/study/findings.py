"""All comparisons of a study: which level was sooner, by how much, and how certainly."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.observe.words import number_text, span_text
from paceline.study.statistics import Ratio, adjusted_p_values, log_ratios, paired_ratio
from paceline.study.trials import METHOD, NOT_SET, Measure, Trials

FALSE_DISCOVERIES = 0.05
AS_PRINTED = 1.005  # limits closer to 1 are printed as 1.00
_MOST_CELLS = 64


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two levels of a factor, compared by pairs of trials that differ in it alone."""

    factor: str  # `METHOD` for methods
    base: Any  # the level that the other is compared with
    other: Any  # the other level; a ratio above 1 means that this one was sooner
    where: tuple[tuple[str, Any], ...]  # levels of other factors that the pairs have; empty: all pairs
    measure: Measure
    ratio: Ratio
    adjusted_p: float = 1.0  # its p-value, adjusted for all comparisons made together

    @property
    def found(self) -> bool:
        """Whether it is a finding: the printed interval excludes 1, and it stays significant among all comparisons."""
        return self.adjusted_p <= FALSE_DISCOVERIES and (
            self.ratio.low > AS_PRINTED or self.ratio.high < 1 / AS_PRINTED
        )

    @property
    def testable(self) -> bool:
        """Whether enough pairs exist for an interval."""
        return self.ratio.method != "none"

    @property
    def centre(self) -> float:
        """One number for the ratio; 1 if it is unknown which side was sooner, because runs did not reach the target."""
        ratio = self.ratio
        if ratio.at_least >= 1:
            return ratio.at_least
        if ratio.at_most <= 1:
            return ratio.at_most
        return math.sqrt(ratio.at_least * ratio.at_most) if ratio.at_least and math.isfinite(ratio.at_most) else 1.0

    @property
    def flipped(self) -> Comparison:
        ratio = replace(
            self.ratio, at_least=_inverse(self.ratio.at_most), at_most=_inverse(self.ratio.at_least),
            low=_inverse(self.ratio.high), high=_inverse(self.ratio.low),
        )  # fmt: skip
        return replace(self, base=self.other, other=self.base, ratio=ratio)

    @property
    def leading(self) -> Comparison:
        """The same comparison with the sooner side as `other`."""
        return self.flipped if self.centre < 1 else self


def compare_everything(trials: Trials, measure: Measure) -> list[Comparison]:
    """Compare all pairs of methods, overall and at each level of other factors, and each factor's levels with its first.

    The p-values of all comparisons are adjusted together. Comparisons with too few pairs are also returned, but cannot be
    findings.
    """
    asked = [*_of_methods(trials), *_of_factors(trials)]
    made = (_compare(trials, measure, *one) for one in dict.fromkeys(asked))
    return _adjusted([one for one in made if one.ratio.pairs])


def compare_levels(trials: Trials, measure: Measure, where: Mapping[str, Any]) -> list[Comparison]:
    """Compare each method with the baseline; p-values are adjusted together."""
    others = [method for method in trials.methods if method != trials.baseline]
    held = tuple(where.items())
    return _adjusted([_compare(trials, measure, METHOD, trials.baseline, other, held) for other in others])


def _compare(
    trials: Trials, measure: Measure, factor: str, base: Any, other: Any, where: tuple[tuple[str, Any], ...]
) -> Comparison:
    times = trials.times(measure)
    first, second = trials.pairs(factor, base, other, dict(where))
    settings = [column[first].tolist() for name, column in trials.column_of.items() if name != "seed"]
    one_setting = len(set(zip(*settings, strict=True))) <= 1
    ratio = paired_ratio(*log_ratios(times[first], times[second]), one_setting=one_setting)
    return Comparison(factor, base, other, where, measure, ratio)


def _adjusted(made: Sequence[Comparison]) -> list[Comparison]:
    tested = [one for one in made if one.testable]
    adjusted = iter(adjusted_p_values([one.ratio.p_value for one in tested]).tolist())
    return [replace(one, adjusted_p=next(adjusted)) if one.testable else one for one in made]


def _of_methods(trials: Trials) -> Iterator[tuple[str, Any, Any, tuple[tuple[str, Any], ...]]]:
    levels = {name: trials.factors[name] for name in trials.others}
    places: list[tuple[tuple[str, Any], ...]] = [()]
    places += [((name, level),) for name, known in levels.items() for level in known]
    if len(levels) > 1 and math.prod(map(len, levels.values())) <= _MOST_CELLS:
        places += [tuple(zip(levels, cell, strict=True)) for cell in itertools.product(*levels.values())]
    baseline_first = sorted(trials.methods, key=lambda method: method != trials.baseline)
    for base, other in itertools.combinations(baseline_first, 2):
        for where in places:
            yield METHOD, base, other, where


def _of_factors(trials: Trials) -> Iterator[tuple[str, Any, Any, tuple[tuple[str, Any], ...]]]:
    methods = trials.methods if len(trials.methods) > 1 else []
    for factor in trials.others:
        yield from _with_first(trials, factor, METHOD, methods)
    for factor in trials.own_fields:
        yield from _with_first(trials, factor, trials.by, trials.levels(trials.by))


def _with_first(
    trials: Trials, factor: str, holder: str, held: Sequence[Any]
) -> Iterator[tuple[str, Any, Any, tuple[tuple[str, Any], ...]]]:
    base, *others = [level for level in trials.factors[factor] if level != NOT_SET]
    for other in others:
        yield factor, base, other, ()
        for level in held:
            yield factor, base, other, ((holder, level),)


def times_text(ratio: Ratio) -> str:
    """The ratio: `1.40x`; if runs did not reach the target, bounds such as `1.40 to 1.50x` or `at least 2.3x`."""
    if math.isinf(ratio.at_least):
        return "\N{INFINITY}x"
    if math.isinf(ratio.at_most):
        return f"at least {_number(ratio.at_least)}x"
    return " to ".join(dict.fromkeys([_number(ratio.at_least), _number(ratio.at_most)])) + "x"


def interval_text(ratio: Ratio) -> str:
    """`95 % interval 1.20 to 1.70`, or why there is none."""
    if ratio.method == "none":
        return "too few pairs"
    if math.isinf(ratio.low):
        return "95 % interval beyond any factor"
    if ratio.low == 0:
        return f"95 % interval {'without bounds' if math.isinf(ratio.high) else _number(ratio.high) + ' or less'}"
    return f"95 % interval {span_text(ratio.low, ratio.high, _number)}"


def _number(value: float) -> str:
    return f"{value:.2f}" if value < 1.995 else number_text(value, 2)


def _inverse(value: float) -> float:
    return math.inf if value == 0 else 1 / value
