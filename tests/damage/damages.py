"""Damages to files: what a failing disk, a cut transfer or an unlucky editor does to them, drawn with a seed."""

import random
import shutil
from dataclasses import dataclass

KINDS = ("flip", "delete", "truncate", "insert", "repeat", "swap")


@dataclass(frozen=True)
class Damage:
    """What is done to one file; `str` of it repeats it.

    Args:
        file: path in the subject's folder.
        kind: one of `KINDS`.
        seed: of where and with what.
    """

    file: str
    kind: str
    seed: int

    def apply(self, folder):
        """Does it; returns whether the file is another one now."""
        path = folder / self.file
        before = path.read_bytes()
        if self.kind == "delete":
            path.unlink()
            return True
        after = damaged(before, self.kind, random.Random(self.seed))
        path.write_bytes(after)
        return after != before


def damaged(content, kind, draws):
    """The content with this done to it."""
    if not content:
        return bytes(draws.randrange(256) for _ in range(draws.randrange(1, 64)))
    at, other = sorted(draws.randrange(len(content)) for _ in range(2))
    length = min(draws.choice([1, 2, 8, 64, 1024]), len(content))
    match kind:
        case "flip":
            flipped = bytearray(content)
            for _ in range(draws.choice([1, 1, 1, 8])):
                flipped[draws.randrange(len(content))] ^= 1 << draws.randrange(8)
            return bytes(flipped)
        case "truncate":
            return content[: draws.choice([0, at, other, len(content) - 1])]
        case "insert":
            letters = draws.choice([bytes(range(256)), b"0123456789", b'-.eE,:[]{}"\n ', b"\x00"])
            return content[:at] + bytes(draws.choice(letters) for _ in range(length)) + content[at:]
        case "repeat":  # a part of the file once more, somewhere
            part = content[other : other + length]
            lines = content.splitlines(keepends=True)
            if draws.random() < 0.5 and len(lines) > 1:
                chosen = draws.randrange(len(lines))
                lines.insert(draws.randrange(len(lines)), lines[chosen])
                return b"".join(lines)
            return content[:at] + part + content[at:]
        case "swap":  # two parts of equal length change places
            length = min(length, max(1, other - at), len(content) - other)
            first, second = content[at : at + length], content[other : other + length]
            return content[:at] + second + content[at + length : other] + first + content[other + length :]
    raise AssertionError(kind)


def draw(files, number, seed):
    """So many damages: every file in turn, and of every file every kind in turn, beginning somewhere."""
    draws = random.Random(seed)
    order = [file for file in files if not file.endswith(("report.html", "trace.json"))]  # no verb reads these
    draws.shuffle(order)
    first = draws.randrange(len(KINDS))
    return [
        Damage(order[n % len(order)], KINDS[(first + n // len(order) + n) % len(KINDS)], draws.randrange(2**32))
        for n in range(number)
    ]


def copied(source, to):
    """The folder once more, for a damage of its own."""
    shutil.copytree(source, to)
    return to


def files_of(folder):
    """All files in it, as text, in their order."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
