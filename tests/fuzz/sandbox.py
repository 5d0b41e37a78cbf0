"""Command lines run where they can do no harm: each in a child of its own, in a folder of its own, within limits."""

import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parent.parent
LIMIT_S = 300.0  # against hangs: a busy host can make a machine many times slower for minutes


@dataclass(frozen=True)
class Ended:
    """How a command line ended."""

    words: tuple[str, ...]
    code: int
    out: str
    err: str
    took_s: float
    stopped: str  # why it had to be stopped; empty: it ended by itself
    left: tuple[str, ...]  # processes that it left behind
    made: tuple[str, ...]  # files and folders that it made or changed


class Sandbox:
    """Runs command lines one after the other. Use as a context.

    Args:
        folder: everything that happens is in there.
        template: what every command line finds in its working folder.
    """

    def __init__(self, folder: Path, template: Path) -> None:
        self._folder, self._template = folder, template
        self.work = folder / "work"  # where the last command line was run

    def __enter__(self) -> "Sandbox":
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PACELINE")}
        environment |= {
            "PYTHONPATH": os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "TMPDIR": str(self._folder / "tmp"), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "COLUMNS": "200",
        }  # fmt: skip
        (self._folder / "tmp").mkdir(parents=True)
        self._zygote = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("zygote.py"))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=self._folder,
        )  # fmt: skip
        assert self._zygote.stdout is not None
        assert self._zygote.stdout.readline() == "ready\n"
        return self

    def __exit__(self, *_: object) -> None:
        assert self._zygote.stdin is not None
        assert self._zygote.stdout is not None
        self._zygote.stdin.close()
        self._zygote.stdout.close()
        self._zygote.wait(60)

    def run(self, *words: str, files: Mapping[str, str] | None = None, limit_s: float = LIMIT_S) -> Ended:
        """Runs `paceline WORDS` in a fresh copy of the template, with more files in it."""
        assert self._zygote.stdin is not None
        assert self._zygote.stdout is not None
        work, scratch = self.work, self._folder / "scratch"
        for path in (work, scratch):
            shutil.rmtree(path, ignore_errors=True)
        subprocess.run(["cp", "-a", str(self._template), str(work)], check=True)  # shutil would read the pipe in it
        scratch.mkdir()
        for name, text in (files or {}).items():
            (work / name).write_text(text, errors="surrogateescape")
        before = _state(work) | self._litter()
        request = {"words": words, "folder": str(work), "scratch": str(scratch), "limit_s": limit_s}
        print(json.dumps(request), file=self._zygote.stdin, flush=True)
        found = json.loads(self._zygote.stdout.readline())
        after = _state(work) | self._litter()
        made = [name for name, state in after.items() if before.get(name) != state]
        made += [name for name in before if name not in after]
        return Ended(words, made=tuple(sorted(made)), **{**found, "left": tuple(found["left"])})

    def _litter(self) -> dict[str, tuple[int, str]]:
        return {f"tmp/{path.name}": (0, "") for path in (self._folder / "tmp").iterdir()}


def _state(folder: Path) -> dict[str, tuple[int, str]]:
    """All files but those that Python makes of what it imports, unless its user has told it not to."""
    found = {}
    for path in folder.rglob("*"):
        if "__pycache__" in path.parts:
            continue
        kind = stat.S_IFMT(path.lstat().st_mode)
        content = hashlib.sha256(path.read_bytes()).hexdigest() if kind == stat.S_IFREG else ""
        found[str(path.relative_to(folder))] = (kind, content)
    return found
