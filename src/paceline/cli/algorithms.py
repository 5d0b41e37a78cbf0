"""`paceline algorithms` and `paceline cite`: the available algorithms, and their papers."""

from __future__ import annotations

import inspect
from dataclasses import asdict
from typing import Annotated, Any

import typer

import paceline
from paceline.cli.card import card
from paceline.cli.console import out, print_json
from paceline.errors import UsageError

_SOFTWARE = """\
@software{{paceline,
  title = {{Paceline: parallel, asynchronous and distributed SGD for PyTorch}},
  author = {{{{The Paceline authors}}}},
  version = {{{version}}},
  year = {{2026}},
  note = {{Apache-2.0}},
}}"""


def algorithms(
    name: Annotated[str | None, typer.Argument(help="Algorithm whose card is printed.")] = None,
    tolerates: Annotated[
        str | None, typer.Option(help="List only algorithms that tolerate this fault, such as kill.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a list of JSON objects.")] = False,
) -> None:
    """List every algorithm: its spec with all defaults, what it does, and which faults it tolerates.

    With a name: its card, which says what it costs, when to take it, and how it differs from its paper.

    Example: paceline algorithms --tolerates kill
    """
    if name is not None:
        if tolerates is not None:
            raise UsageError("A card says what its algorithm tolerates: leave out --tolerates, or the name.")
        shown = card(name)
        if as_json:
            print_json(asdict(shown))
        else:
            out().print(shown.text, soft_wrap=False)
        return
    rows = _rows()
    if tolerates is not None:
        known = sorted({fault for row in rows for fault in row["tolerates"]})
        if tolerates not in known:
            raise UsageError(f"No algorithm tolerates '{tolerates}'; choose {' or '.join(known)}.")
        rows = [row for row in rows if any(fault.startswith(tolerates) for fault in row["tolerates"])]
    if as_json:
        print_json(rows)
    else:
        out().print(_table(rows))


def _rows() -> list[dict[str, Any]]:
    from paceline.algorithms import registry

    return [
        {
            "name": name,
            "spec": registry.template(name),
            "summary": (inspect.getdoc(cls) or "").partition("\n")[0],
            "tolerates": list(getattr(cls, "tolerates", ())),
        }
        for name, cls in registry.items()
    ]


def _table(rows: list[dict[str, Any]]) -> Any:
    from paceline.observe.document import Cell, Table
    from paceline.observe.terminal import terminal_table

    heads = [Cell(name, kind="name") for name in ("Spec, with every default", "What it does", "Tolerates")]
    texts = [[row["spec"], row["summary"], ", ".join(row["tolerates"]) or "nothing"] for row in rows]
    return terminal_table(Table(texts, heads))


def cite(
    algorithms: Annotated[list[str] | None, typer.Argument(help="Algorithms whose papers are printed, too.")] = None,
) -> None:
    """Print how to cite Paceline, as BibTeX, and the papers of the algorithms that are named.

    Example: paceline cite leashed ad-psgd
    """
    papers = [card(name) for name in algorithms or ()]
    print(_SOFTWARE.format(version=paceline.__version__))
    for one in papers:
        print(f"\n{one.name}: {one.parts['Reference']}")
