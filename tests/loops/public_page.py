"""Writes docs/public_loops.md: `python -m loops.public_page`, from the folder of tests."""

import json
from pathlib import Path

from loops import public

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "public_loops.md"
FIGURES = json.loads((ROOT / "benchmarks" / "results" / "soak_public_loops.json").read_text(encoding="utf-8"))
HEAD = """\
# Example loops

These loops are written like PyTorch's public examples (`tests/loops/public/`). Each section lists the changes beyond the two
lines (`with pl.attach(model, optimizer) as worker:`, and `worker.batches(loader)` if the loop has a loader). With one worker
each ends exactly where the plain loop does. `make soak` runs each with two worker processes and requires nine tenths of one
worker's progress from as many samples. The figures are from its last run, in each loop's own measure: a loss, an error rate,
a distance. Other habits: [Your loop](your_loop.md).
"""


def section(name):
    """One loop: what it is, where it runs, and its lines beyond the two."""
    module = public.module_of(name)
    what = module.__doc__.strip().partition(": ")[2]
    rows = [f"| `{line}` | {why} |" for line, why in module.TAKES.items()]
    table = ["| beyond the two lines | because |", "|---|---|", *rows]
    return "\n".join([f"\n## {name}\n", f"{what[0].upper()}{what[1:]}", "", *figures(name), "", *table, ""])


def figures(name):
    """What is left to learn, of the last marathon."""
    rows = []
    for algorithm in public.meant_for(name):
        found = FIGURES[f"{name} {algorithm}"]
        left = [f"{one:.3f}" for one in (found["untrained"], found["one worker"], max(found["two workers"]))]
        rows.append(f"| `{algorithm}` | {' | '.join(left)} |")
    return ["| algorithm | untrained | one worker, plain PyTorch | two workers |", "|---|---|---|---|", *rows]


def rendered():
    return HEAD + "".join(map(section, public.NAMES))


if __name__ == "__main__":
    PAGE.write_text(rendered(), encoding="utf-8")
