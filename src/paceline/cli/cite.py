"""`paceline cite`: how to cite Paceline, and the paper of an algorithm."""

from __future__ import annotations

from typing import Annotated

import typer

import paceline
from paceline.cli.card import card

_SOFTWARE = """\
@software{{paceline,
  title = {{Paceline: parallel, asynchronous and distributed SGD for PyTorch}},
  author = {{{{The Paceline authors}}}},
  version = {{{version}}},
  year = {{2026}},
  note = {{Apache-2.0}},
}}"""


def cite(
    algorithms: Annotated[list[str] | None, typer.Argument(help="Name the papers of these, too.")] = None,
) -> None:
    """Print how to cite Paceline, as BibTeX, and the papers of the algorithms that are named.

    Example: paceline cite leashed ad-psgd
    """
    papers = [card(name) for name in algorithms or ()]
    print(_SOFTWARE.format(version=paceline.__version__))
    for one in papers:
        print(f"\n{one.name}: {one.parts['Reference']}")
