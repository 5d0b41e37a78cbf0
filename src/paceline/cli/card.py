"""An algorithm's card, which is its docstring by headings: for `paceline algorithms NAME` and the documentation."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from typing import Any

_TOLERATES = "Tolerates"
#: First words of a docstring's paragraphs, and their headings on a card, in its order.
HEADINGS = {
    "Costs per step:": "Costs per step",
    "Use when:": "Use when",
    "Not:": "Not to be confused with",
    "Tolerates:": _TOLERATES,  # from attributes, not from the docstring
    "When N doubles:": "When the workers double",
    "Clipping acts": "Clipping",
    "Differs from the paper:": "Differences from the paper",
    "Differs from the papers:": "Differences from the paper",
    "Reference:": "Reference",
}
_TOLERANCE = {
    "kill": "a worker that is killed (the others continue)",
    "kill under launch": "a worker that is killed under `launch` or `train` (the others continue; elsewhere the run ends)",
    "straggler": "a slow worker (the others do not wait for it)",
}
_NOTHING = (
    "Nothing: all wait for a slow worker; if a worker dies, the run ends, names it, and continues with `--resume`."
)
# Arguments that change these statements.
_BUT = {
    "shares": " All wait for a slow worker; with `shares=auto` it gets smaller batches.",
    "sharded": " A death ends the run with `sharded` and with a layout.",
    "mode": " In `mode=sync`, the default, all wait for a slow worker, unless `backups` leave it out.",
}
_LONE = "One worker only: if it dies, the run ends and continues with `--resume`."


@dataclass(frozen=True)
class Card:
    """What a user should know about an algorithm before choosing it."""

    name: str
    spec: str
    summary: str
    about: tuple[str, ...]
    parts: dict[str, str]
    arguments: dict[str, str]

    @property
    def text(self) -> str:
        blocks = [f"{self.name}: {self.summary}", *self.about]
        blocks += [f"{heading}: {text}" for heading, text in self.parts.items() if heading != "Reference"]
        blocks.append(f"Spec, with every default: {self.spec}")
        blocks += [f"  {name}: {meaning}" for name, meaning in self.arguments.items()]
        return "\n\n".join([*blocks, f"Reference: {self.parts['Reference']}"])


def card(name: str) -> Card:
    """The card of a registered algorithm.

    Raises:
        UsageError: there is none of this name; the message suggests the closest one.
    """
    from paceline.algorithms import registry

    cls: Any = registry[name]
    summary, *paragraphs = _paragraphs(inspect.getdoc(cls) or "")
    about, parts, arguments = [], {}, {}
    for paragraph in paragraphs:
        label = next((label for label in HEADINGS if paragraph.startswith(label)), None)
        if paragraph.startswith("Args:"):
            arguments = dict(re.findall(r"^ {4}(\w+): (.+(?:\n {5,}.+)*)", paragraph, re.MULTILINE))
        elif label is None:
            about.append(_joined(paragraph))
        else:
            said = _joined(paragraph.removeprefix(label if label.endswith(":") else HEADINGS[label]))
            parts[HEADINGS[label]] = said[0].upper() + said[1:]
    tolerates = " and ".join(_TOLERANCE[fault] for fault in getattr(cls, "tolerates", ()))
    nothing = _LONE if getattr(cls, "max_workers", None) == 1 else _NOTHING
    parts[_TOLERATES] = f"{tolerates[0].upper()}{tolerates[1:]}." if tolerates else nothing
    parts[_TOLERATES] += "".join(said for argument, said in _BUT.items() if argument in arguments)
    return Card(
        name,
        registry.template(name),
        summary,
        tuple(about),
        {heading: parts[heading] for heading in HEADINGS.values() if heading in parts},
        {argument: _joined(meaning) for argument, meaning in arguments.items()},
    )


def _paragraphs(docstring: str) -> list[str]:
    """A docstring's paragraphs; one begins after an empty line, or at a line that begins with a heading's words."""
    starts = "|".join(re.escape(label) for label in HEADINGS)
    return [text for text in re.split(rf"\n\s*\n|\n(?={starts})", docstring) if text.strip()]


def _joined(text: str) -> str:
    return " ".join(text.split())
