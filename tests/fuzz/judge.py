"""What no command line may do, whatever is in it."""

from __future__ import annotations

import re

from fuzz.sandbox import Ended

_CODES = {0, 1, 2}
_NOT_FOR_USERS = re.compile(r"Traceback \(|Exception ignored|Segmentation fault|Fatal Python error|\w+Warning: ")


def wrongs(ended: Ended) -> list[str]:
    """What is wrong with how a command line ended; empty: nothing."""
    both = ended.out + ended.err
    found = []
    if ended.stopped:
        found.append(ended.stopped)
    elif ended.code not in _CODES:
        found.append(f"exit code {ended.code}")
    # A result as JSON may hold the traceback of a crash.
    shown = "\n".join(line for line in both.splitlines() if not line.startswith("{"))
    if match := _NOT_FOR_USERS.search(shown):
        found.append(f"says {match[0]}")
    if odd := {one for one in both if not one.isprintable() and one != "\n"}:
        found.append(f"prints {sorted(odd)} as they are")
    if ended.left:
        found.append(f"leaves {ended.left} running")
    said = [line for line in ended.err.splitlines() if line.startswith("paceline: ")]
    is_help = "Usage:" in both
    if ended.code == 2 and not is_help:
        if len(said) != 1 or ended.err.rstrip("\n").splitlines()[-1:] != said:
            found.append("does not end in one sentence")
        elif not said[0].endswith((".", "?", "!")):
            found.append("a sentence without an end")
        if ended.made:
            found.append(f"makes {ended.made[:3]} though it refuses")
    if ended.code == 1 and not said and "Crashed" not in both:
        found.append("fails without a word")
    if any(len(line) > 3000 for line in ended.err.splitlines()):
        found.append("says too much")
    return found
