"""Writes the tables into docs/what_works_together.md: `python -m composition.page`, from the folder of tests."""

import re
import warnings
from functools import cache
from pathlib import Path

from composition.drawn import ALGORITHMS, CODECS, with_codec
from composition.loop import Case, Lost, Refused, simulated
from composition.methods import check

PAGE = Path(__file__).parents[2] / "docs" / "what_works_together.md"
BEGIN, END = "<!-- the tables -->\n", "<!-- the end of the tables -->\n"
ADDED = {
    "momentum": {"optimizer": "momentum"},
    "Nesterov": {"optimizer": "nesterov"},
    "AdamW": {"optimizer": "adamw"},
    "Adagrad": {"optimizer": "adagrad"},
    "accumulation": {"passes": 3, "marked": True},
    "clipping": {"clip": 0.5},
    "GradScaler": {"scaler": True, "overflow": (1, 2)},
    "uneven batches": {"workers": 3, "samples": 22},
    "sparse gradients": {"sparse": True},
    "a slow worker": {"slow": (0, 10.0)},
    "a killed worker": {"kill": (1, 2)},
}
CODED = {
    f"`{codec.split('(')[0]}`" + " with feedback" * ("feedback" in codec): codec
    for codec in CODECS
    if "l2" not in codec
}


@cache
def outcome(algorithm, what):
    """What an algorithm comes to with one more thing, on simulated workers: "" where it is right, or a sentence."""
    case = Case(with_codec(algorithm, CODED[what])) if what in CODED else Case(algorithm, **ADDED[what])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        found = simulated(case)
    if isinstance(found, Lost):
        return "The run ends; resume from its newest checkpoint."
    if isinstance(found, Refused):
        return found.sentence
    check(case, found)
    return ""


def table(columns, reasons, outcome):
    """Algorithms by what they meet: yes, or the number of a reason, which is added to `reasons`."""
    lines = [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for algorithm in ALGORITHMS:
        said = [outcome(algorithm, what) for what in columns]
        cells = [f"[{reasons.setdefault(one, len(reasons) + 1)}]" if one else "yes" for one in said]
        lines.append(f"| `{algorithm}` | {' | '.join(cells)} |")
    return lines


def rendered(outcome):
    reasons = {}
    lines = [
        *table(ADDED, reasons, outcome),
        "",
        "With a codec:",
        "",
        *table(CODED, reasons, outcome),
        "",
        "Reasons:",
        "",
        *(f"{number}. `{reason}`" for reason, number in reasons.items()),
    ]
    return "\n".join([*lines, ""])


def filled(page, outcome=outcome):
    """The page with the tables as they are now."""
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + rendered(outcome) + END + rest.partition(END)[2]


def written(page):
    """The outcomes that the page shows, by algorithm and what it meets."""
    reasons = dict(re.findall(r"^(\d+)\. `(.*)`$", page, re.MULTILINE)) | {"yes": ""}
    columns, found = [], {}
    for line in page.partition(BEGIN)[2].partition(END)[0].splitlines():
        first, *cells = line.strip("| ").split(" | ")
        if line.startswith("| | "):
            columns = [first, *cells]
        elif line.startswith("| `"):
            found |= {
                (first.strip("`"), what): reasons[cell.strip("[]")] for what, cell in zip(columns, cells, strict=True)
            }
    return found


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
