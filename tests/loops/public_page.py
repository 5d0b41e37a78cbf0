"""Writes docs/public_loops.md: `python -m loops.public_page`, from the folder of tests."""

from pathlib import Path

from loops import public

PAGE = Path(__file__).parents[2] / "docs" / "public_loops.md"
HEAD = """\
# What well-known loops take

Loops in the manner of PyTorch's public examples, written from their habits: the files are in `tests/loops/public/`. Each takes
the two lines (`with pl.attach(model, optimizer) as worker:`, and `worker.batches(loader)` where it has a loader), and what
stands below it. With one worker each ends exactly where the plain loop does; `make soak` runs each with two worker processes
under the algorithms named, and asks that they learn nine tenths of what one worker learns, from as many samples. What other
habits take: [Your loop](your_loop.md).
"""


def section(name):
    """One loop: what it is, where it runs, and its lines beyond the two."""
    module = public.module_of(name)
    what = module.__doc__.strip().partition(": ")[2]
    names = ", ".join(f"`{one}`" for one in public.meant_for(name))
    rows = [f"| `{line}` | {why} |" for line, why in module.TAKES.items()]
    table = ["| beyond the two lines | because |", "|---|---|", *rows]
    return "\n".join([f"\n## {name}\n", f"{what[0].upper()}{what[1:]}", "", f"Under {names}.", "", *table, ""])


def rendered():
    return HEAD + "".join(map(section, public.NAMES))


if __name__ == "__main__":
    PAGE.write_text(rendered(), encoding="utf-8")
