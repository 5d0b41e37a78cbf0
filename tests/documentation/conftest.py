"""Runs what the documentation shows, in a folder of its own."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from forked import AGAINST_HANGS_S, run

ROOT = Path(__file__).parents[2]
MAIN = "import sys\nfrom paceline.cli.app import main\nif __name__ == '__main__':\n    sys.argv[0] = 'paceline'\n    main()\n"


class Shell:
    """Runs command lines with `paceline` and `python` of this environment.

    Args:
        folder: where they run, with the examples in it.
    """

    def __init__(self, folder):
        self.folder = folder
        (folder / "examples").symlink_to(ROOT / "examples")
        (folder / "bin").mkdir()
        self._main = folder / "bin" / "main.py"
        self._main.write_text(MAIN)
        for name, arguments in (("python", ""), ("paceline", f"'{self._main}'")):
            script = folder / "bin" / name
            script.write_text(f"#!/bin/sh\nexec '{sys.executable}' -W error::UserWarning {arguments} \"$@\"\n")
            script.chmod(0o755)
        self._environment = {
            **os.environ,
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
            "COLUMNS": "200",
            "NO_COLOR": "1",
        }

    def __call__(self, command, *, expect=0, anew=False):
        """What it printed, colourless; in a process that is forked, or started `anew` as a reader's shell does it."""
        done = (self._anew if anew else self._forked)(command)
        assert done.returncode == expect, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    def _anew(self, command):
        return subprocess.run(
            ["bash", "-c", command],
            cwd=self.folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=AGAINST_HANGS_S,
        )

    def _forked(self, command):
        words, environment = shlex.split(command, comments=True), dict(self._environment)
        while setting := re.fullmatch(r"(\w+)=(.*)", words[0]):
            environment[setting[1]] = setting[2]
            words = words[1:]
        program = {"python": [], "paceline": [self._main]}[words[0]]
        return run([*program, *words[1:]], self.folder, environment, errors=UserWarning)


@pytest.fixture(scope="module")
def shell(tmp_path_factory, fork_server):
    return Shell(tmp_path_factory.mktemp("reader"))
