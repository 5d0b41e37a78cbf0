"""What every script here ends with: its page is printed and, with `--write`, put beside the script."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

__all__ = ["show"]


def show(lines: Iterable[str], script: str) -> None:
    """Prints the page; `script` is the caller's `__file__`."""
    text = "\n".join(lines) + "\n"
    print(text)
    if "--write" in sys.argv:
        Path(script).with_suffix(".md").write_text(text, encoding="utf-8")
