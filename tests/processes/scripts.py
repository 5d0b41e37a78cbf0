"""Starts Python programs of their own, as a user's shell would, in a process group of their own."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap

import forked


@contextlib.contextmanager
def started(folder, source, *arguments, anew=False, **environment):
    """The running program, forked or `anew`; whatever becomes of the test, its process group is gone afterwards."""
    script = folder / "script.py"
    script.write_text(textwrap.dedent(source))
    if not anew:
        with forked.Python([script, *arguments], folder, {**os.environ, **environment}) as process:
            yield process
        return
    process = subprocess.Popen(
        [sys.executable, "-W", "error", script, *map(str, arguments)],
        cwd=folder,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


COMMAND = """
    from paceline.cli.app import main

    if __name__ == "__main__":
        main()
"""
