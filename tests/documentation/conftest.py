"""Runs what the documentation shows, in a folder of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def shell(tmp_path_factory):
    """Runs a command line with `paceline` and `python` of this environment; returns what it printed, colourless."""
    folder = tmp_path_factory.mktemp("reader")
    (folder / "examples").symlink_to(ROOT / "examples")
    (folder / "bin").mkdir()
    for name, arguments in (("python", ""), ("paceline", f"'{folder}/bin/main.py'")):
        script = folder / "bin" / name
        script.write_text(f"#!/bin/sh\nexec '{sys.executable}' -W error::UserWarning {arguments} \"$@\"\n")
        script.chmod(0o755)
    (folder / "bin" / "main.py").write_text(
        "import sys\nfrom paceline.cli.app import main\nif __name__ == '__main__':\n    sys.argv[0] = 'paceline'\n    main()\n"
    )
    environment = {
        **os.environ,
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
        "COLUMNS": "200",
        "NO_COLOR": "1",
    }

    def run(command, *, expect=0):
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=150,
        )
        assert done.returncode == expect, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    run.folder = folder
    return run
