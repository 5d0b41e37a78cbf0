"""A page for each algorithm: its docstring's card, and a figure of a run of its own."""

from paceline.algorithms import registry
from paceline.cli.card import Card, card

from . import figures


def files() -> dict[str, str]:
    """The pages, their figures, and the list of all."""
    made = {}
    for name in registry:
        one = card(name)
        made[f"cards/{name}.md"] = page(one)
        made[f"generated/drawing-{name}.svg"] = figures.of_run(name)
    rows = [f"| [`{name}`](cards/{name}.md) | {card(name).summary} |" for name in registry]
    made["generated/cards.md"] = "\n".join(["| algorithm | what it is |", "|---|---|", *rows, ""])
    return made


def page(one: Card) -> str:
    """A card as Markdown."""
    lines = [f"# {one.name}", "", one.summary, ""]
    for paragraph in one.about:
        lines += [paragraph, ""]
    lines += ["## Example run", "", f"```{{drawing}} {one.name}", "```", ""]
    lines += [figures.said_of(one.name), ""]
    for heading, text in one.parts.items():
        lines += [f"## {heading}", "", linked(text), ""]
    lines += [
        "## Spec",
        "",
        "With all defaults:",
        "",
        "```text",
        one.spec.replace(", ", ",\n    ") if len(one.spec) > 80 else one.spec,
        "```",
        "",
    ]
    if one.arguments:
        lines += ["| argument | meaning |", "|---|---|"]
        lines += [f"| `{name}` | {text.replace('|', chr(92) + '|')} |" for name, text in one.arguments.items()]
        lines += [""]
    lines += [
        f"In a terminal: `paceline algorithms {one.name}`. Syntax: [Specs](../specs.md).",
        "",
    ]
    return "\n".join(lines)


def linked(text: str) -> str:
    """Papers on arXiv as links."""
    import re

    return re.sub(r"arXiv:(\d{4}\.\d{4,5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", text)
