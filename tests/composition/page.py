"""Writes the table into docs/what_works_together.md: `python -m composition.page`, from the folder of tests."""

import warnings
from functools import cache
from pathlib import Path

from composition.drawn import ALGORITHMS, CODECS, with_codec
from composition.loop import Case, Lost, Refused, simulated
from composition.methods import check

PAGE = Path(__file__).parents[2] / "docs" / "what_works_together.md"
BEGIN, END = "<!-- the table -->\n", "<!-- the end of the table -->\n"
CODED = {f"`codec={codec}`": codec for codec in CODECS}
ADDED = {
    "SGD with momentum": {"optimizer": "momentum"},
    "SGD with Nesterov's momentum": {"optimizer": "nesterov"},
    "AdamW": {"optimizer": "adamw"},
    "Adagrad": {"optimizer": "adagrad"},
    "several backward passes before a step": {"passes": 3},
    "the same, in `worker.accumulate()`": {"passes": 3, "marked": True},
    "gradients clipped by their norm": {"clip": 0.5},
    "GradScaler, and a step that overflows": {"scaler": True, "overflow": (1, 2)},
    "uneven batches, or none for some workers": {"workers": 3, "samples": 22},
    "a worker ten times slower": {"slow": (0, 10.0)},
    "a worker that is killed": {"kill": (1, 2)},
}


@cache
def outcome(algorithm, what):
    """What an algorithm comes to with one more thing, on simulated workers: "" where it is right, or a sentence."""
    case = Case(with_codec(algorithm, CODED[what])) if what in CODED else Case(algorithm, **ADDED[what])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        found = simulated(case)
    if isinstance(found, Lost):
        return "The run ends; go on from its newest checkpoint."
    if isinstance(found, Refused):
        return found.sentence.replace(case.algorithm, algorithm)
    check(case, found)
    return ""


def row(what):
    """One thing: with which algorithms it works, and what others say."""
    said = {algorithm: outcome(algorithm, what) for algorithm in ALGORITHMS}
    works = [algorithm for algorithm in ALGORITHMS if not said[algorithm]]
    others = [algorithm for algorithm in ALGORITHMS if said[algorithm]]
    where = (
        "all" if not others else "none" if not works else names(works) if len(works) <= len(others) else "all others"
    )
    sentences = dict.fromkeys(said[algorithm] for algorithm in others)
    refused = "; ".join(f"{names([a for a in others if said[a] == one])}: “{one}”" for one in sentences)
    return f"| {what} | {where} | {refused or ' '} |"


def names(algorithms):
    return ", ".join(f"`{one}`" for one in algorithms)


def rendered():
    lines = ["| together with | works | refused |", "|---|---|---|", *map(row, [*ADDED, *CODED])]
    return "\n".join([*lines, ""])


def filled(page):
    """The page with the table as it is now."""
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + rendered() + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
