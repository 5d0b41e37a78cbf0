"""Makes pages again from the committed raw runs: `python benchmarks/pages.py [NAME ...]`; nothing is measured.

Each page is a pure function of its data, so that no number in it can differ from what was measured. Parts of other pages,
between `<!-- NAME: begin -->` and `<!-- NAME: end -->`, are made of the same data. `tests/benchmarks/test_page_figures.py`
compares all of them with their files.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import protocol
from contest import results as contest
from links import page as links

ROOT = Path(__file__).parents[1]
FIDELITY = ROOT / "benchmarks" / "fidelity"
sys.path.append(str(FIDELITY))  # where its scripts look for each other


@dataclass(frozen=True, kw_only=True)
class Page:
    """A page and its data.

    Args:
        page: the file, below the repository's root.
        make: its text, of the runs.
        data: how the raw runs' file beside it ends; None: the page is computed of nothing but its script.
        parts: what it gives to other pages, by file and name of the part.
    """

    page: str
    make: Callable[[Any], str]
    data: str | None = ".jsonl"
    parts: Mapping[tuple[str, str], Callable[[Any], str]] = field(default_factory=dict)

    @property
    def source(self) -> Path | None:
        """The raw runs' file."""
        return (ROOT / self.page).with_suffix(self.data) if self.data else None

    def runs(self) -> Any:
        """The raw runs."""
        if self.source is None:
            return None
        if self.data == ".jsonl":
            return protocol.read(self.source)
        return json.loads(self.source.read_text(encoding="utf-8"))

    def texts(self) -> dict[Path, str]:
        """All files that this page's data decide, as they must be."""
        runs = self.runs()
        made = {ROOT / self.page: self.make(runs)}
        for (file, name), make in self.parts.items():
            text = made.get(ROOT / file) or (ROOT / file).read_text(encoding="utf-8")
            made[ROOT / file] = replaced(text, name, make(runs))
        return made


def replaced(text: str, name: str, part: str) -> str:
    """A page with another text between the marks of a part."""
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
    before, _, rest = text.partition(begin)
    return before + begin + part.rstrip("\n") + "\n" + end + rest.partition(end)[2]


def foresight(parts: Mapping[str, Any]) -> str:
    """The page on predictions; its settings are in `foresight.toml`."""
    from foresight import Plan
    from foresight_report import report

    return report(Plan(), parts)


def skewed_slow_workers(runs: list[dict[str, Any]]) -> str:
    """The page on workers with data of their own."""
    from skewed_slow_workers import markdown

    return markdown(runs)


def das(_: None) -> str:
    """The page on a paper's schedule."""
    from das import page

    return "\n".join(page()) + "\n"


def shared_memory(runs: list[dict[str, Any]]) -> str:
    """The page on shared memory."""
    from shared_memory_page import markdown

    return markdown(runs)


def simulator(runs: list[dict[str, Any]]) -> str:
    """The page on the simulator's speed."""
    from simulator_speed import markdown

    return markdown(runs)


PAGES = {
    "head_to_head": Page(
        page="benchmarks/results/head_to_head.md",
        make=contest.markdown,
        parts={
            ("docs/which_algorithm.md", "head_to_head"): contest.part_summary,
            ("README.md", "head_to_head"): contest.short_summary,
        },
    ),
    "slow_network": Page(
        page="benchmarks/results/slow_network.md",
        make=links.markdown,
        parts={("docs/slow_network.md", "slow_network"): lambda runs: "\n".join(links.short_table(runs))},
    ),
    "shared_memory": Page(page="benchmarks/results/shared_memory.md", make=shared_memory),
    "simulator": Page(page="benchmarks/results/simulator.md", make=simulator),
    "foresight": Page(page="benchmarks/fidelity/foresight.md", data=".json", make=foresight),
    "skewed_slow_workers": Page(page="benchmarks/fidelity/skewed_slow_workers.md", make=skewed_slow_workers),
    "das": Page(page="benchmarks/fidelity/das.md", data=None, make=das),
}


def main() -> None:
    """Writes the pages that are named, or all."""
    for name in sys.argv[1:] or PAGES:
        if name not in PAGES:
            sys.exit(f"pages.py: error: there is no page '{name}'; known: {', '.join(PAGES)}.")
        for path, text in PAGES[name].texts().items():
            path.write_text(text, encoding="utf-8")
            print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
