"""Programs in processes of their own, forked with PyTorch and Paceline loaded: what a start takes is three seconds less."""

import contextlib
import os
import runpy
import sys
import warnings
from pathlib import Path

from paceline.fork_server import fork_server_context


@contextlib.contextmanager
def running(program, arguments, environments, folder):
    """One process for each environment, in a session of its own; they are gone afterwards. They write into `folder`."""
    context = fork_server_context()
    found = [
        context.Process(
            target=_run, args=(str(program), arguments, {**os.environ, **environment}, _files(folder, number))
        )
        for number, environment in enumerate(environments)
    ]
    for process in found:
        process.start()
    try:
        yield found
    finally:
        for process in found:
            process.kill()
            process.join()
            process.close()


def ended(process, number, folder, timeout_s):
    """Waits for it; (exit code, output, errors)."""
    process.join(timeout_s)
    assert process.exitcode is not None, f"still running after {timeout_s} s: {_texts(folder, number)}"
    return process.exitcode, *_texts(folder, number)


def _files(folder, number):
    return [str(folder / f"{number}.{stream}") for stream in ("output", "errors")]


def _texts(folder, number):
    return [Path(path).read_text() for path in _files(folder, number)]


def _run(program, arguments, environment, files):
    os.setsid()
    for stream, path in zip((1, 2), files, strict=True):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    os.environ.clear()
    os.environ.update(environment)
    warnings.simplefilter("error")
    sys.argv = [program, *arguments]
    runpy.run_path(program, run_name="__main__")
