"""Starts Python programs of their own, as a user's shell would, in a process group of their own."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap


@contextlib.contextmanager
def started(folder, source, *arguments, **environment):
    """The running program; whatever becomes of the test, its process group is gone afterwards."""
    process = start(folder, source, *arguments, **environment)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def start(folder, source, *arguments, **environment):
    script = folder / "script.py"
    script.write_text(textwrap.dedent(source))
    return subprocess.Popen(
        [sys.executable, "-W", "error", script, *map(str, arguments)],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, **environment},
    )


COMMAND = """
    from paceline.cli.app import main

    if __name__ == "__main__":
        main()
"""
