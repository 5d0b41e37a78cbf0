"""The command line as a page: every verb, its help and its options, read from the commands themselves."""

import re
from typing import Any

import typer.main

from paceline.cli.app import app


def files() -> dict[str, str]:
    """All verbs, in the order of `paceline --help`."""
    lines: list[str] = []
    _verb(typer.main.get_command(app), "paceline", lines)
    return {"generated/verbs.md": "\n".join(lines)}


def _verb(command: Any, path: str, lines: list[str]) -> None:
    commands = getattr(command, "commands", {})
    if path != "paceline":
        lines += [f"### {path}", ""]
        for paragraph in (command.help or "").split("\n\n"):
            text = " ".join(paragraph.split())
            before, example, after = text.partition("Example: ")
            if before:
                lines += [before.strip(), ""]
            if example:
                lines += ["```text", after, "```", ""]
        rows = [row for one in command.params if not getattr(one, "hidden", False) for row in _rows(one)]
        if rows:
            lines += ["| option | meaning |", "|---|---|", *rows, ""]
    for name, one in commands.items():
        if not getattr(one, "hidden", False):
            _verb(one, f"{path} {name}", lines)


def _rows(one: Any) -> list[str]:
    if "--help" in one.opts:
        return []
    option = one.param_type_name == "option"
    names = ", ".join(f"`{name}`" for name in one.opts) if option else f"`{one.metavar or one.name}`"
    meaning = re.sub(r"([|<*])", r"\\\1", one.help or "")  # what Markdown would take for its own
    return [f"| {names} | {meaning} |"]
