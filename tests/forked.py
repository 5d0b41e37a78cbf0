"""Command lines in processes forked with PyTorch and Paceline loaded: one that imports them itself takes four seconds more.

But for what is loaded such a process is as `python` would have made it: arguments, environment, folder, output and a session
of its own. What it starts itself is forked, too: its fork server, and programs in this Python, such as an agent's workers.
"""

import atexit
import contextlib
import multiprocessing.forkserver
import multiprocessing.process
import multiprocessing.util
import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

from paceline.run.fork_server import fork_server_context

# What programs load that are more than workers. Not torch.distributed.run itself: `python -m` warns of what is loaded. The
# workers' own modules come last, as they freeze what is loaded by then: a worker's collections pass over all of it.
PRELOAD = (
    "one_thread",
    "paceline.advice.advise",
    "paceline.worker.attach",
    "paceline.worker.memberships.elastic",
    "paceline.worker.memberships.launched",
    "paceline.cli.app",
    "paceline.run.simulate_task",
    "paceline.study.report",
    "paceline.study.runner",
    "paceline.run.train",
    "sklearn.datasets",
    "torch.distributed.launcher.api",
    *("jinja2", "paceline.run.launch", "small_plotly"),
    "pytest",  # of workers whose functions are in a file of tests
    *("loops.test_table", "model_parallel.tensor.model", "processes.survivors"),  # such files, and what they share
    *("contracts.programs", "processes.gossip_reference", "processes.programs", "processes.test_join_rounds"),
    "all_threads",
    "paceline.run.preload",
)


_Popen = subprocess.Popen
AGAINST_HANGS_S = 590.0  # just under pytest's own limit, so that what was printed is told


class Python:
    """`python WORDS` in a folder, with what one may ask of a `subprocess.Popen`; as a context it leaves nothing behind.

    Args:
        words: a script and its arguments, or `-m`, a module and its arguments.
        folder: where it starts.
        environment: its variables; None: those of the tests.
        errors: which warnings are errors; None: as by default.
        own_output: whether what it writes is kept here; else it goes where that of this process goes.
    """

    def __init__(self, words, folder=".", environment=None, errors=Warning, own_output=True):
        self.args = list(map(str, words))
        self._written = tempfile.TemporaryDirectory() if own_output else None
        self._files = (
            [str(Path(self._written.name) / stream) for stream in ("output", "errors")] if self._written else []
        )
        environment = dict(os.environ if environment is None else environment)
        arguments = (self.args, str(folder), environment, self._files, errors)
        self._process = fork_server_context().Process(target=_main, args=arguments)
        self._process.start()
        self.pid = self._process.pid
        self.returncode = None

    def poll(self):
        self.returncode = self._process.exitcode
        return self.returncode

    def wait(self, timeout=None):
        self._process.join(timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired([*self.args, *self.written()], timeout)
        return self.returncode

    def communicate(self, timeout=None):
        """Waits for its end; (output, errors)."""
        self.wait(timeout)
        return self.written()

    def written(self):
        """(output, errors) until now, without what Gloo itself prints in PyTorch 2.8 and 2.9."""
        written = (Path(path).read_text() if Path(path).exists() else "" for path in self._files)
        return tuple(re.sub(r"\[Gloo\] Rank .* ranks is : \d+\n", "", one) for one in written)

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self):
        self.send_signal(signal.SIGTERM)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.kill()  # where it has no session of its own yet
        self._process.join()
        self._process.close()
        if self._written is not None:
            self._written.cleanup()


def run(words, folder=".", environment=None, errors=Warning):
    """`Python(...)` seen through to its end, as a `subprocess.CompletedProcess`."""
    with Python(words, folder, environment, errors) as process:
        output, error_output = process.communicate(AGAINST_HANGS_S)
        return subprocess.CompletedProcess(process.args, process.returncode, output, error_output)


@contextlib.contextmanager
def running(words, environments, folder="."):
    """One process for each environment, which is added to that of the tests."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(Python(words, folder, {**os.environ, **one})) for one in environments]


def call(do):
    """What `do` returns in a fork of this process, 0 to 255; 99: it raised."""
    pid = os.fork()
    if not pid:
        try:
            os._exit(do())
        except BaseException:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _main(words, folder, environment, files, errors):
    os.setsid()
    for stream, path in zip((1, 2), files, strict=False):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    os.environ.clear()
    os.environ.update(environment)
    if threads := environment.get("OMP_NUM_THREADS"):  # which PyTorch reads as it is loaded
        torch.set_num_threads(int(threads))
    os.chdir(folder)
    multiprocessing.process.ORIGINAL_DIR = str(Path.cwd())
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    multiprocessing.util.spawnv_passfds = _fork
    fork_server_context()  # now: later this process may have threads
    subprocess.Popen = subprocess_handler.Popen = _popen
    if errors is not None:
        warnings.simplefilter("error", category=errors)
    others = [folder for folder in sys.path if folder not in ("", str(Path(__file__).parent))]
    try:
        if words[0] == "-m":
            sys.argv = words[1:]
            sys.path[:] = [str(Path.cwd()), *others]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            sys.path[:] = [str(Path(words[0]).absolute().parent), *others]
            runpy.run_path(words[0], run_name="__main__")
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)
    finally:
        atexit._run_exitfuncs()


def _popen(args, *, env=None, stdout=None, stderr=None, **options):
    """In place of `subprocess.Popen`: programs in this Python are forked."""
    if args[0] != sys.executable or stdout is not None:
        return _Popen(args, env=env, stdout=stdout, stderr=stderr, **options)
    return Python([word for word in args[1:] if word != "-u"], environment=env, errors=None, own_output=False)


def _fork(path, arguments, descriptors):
    """In place of `multiprocessing.util.spawnv_passfds`: a fork server or a spawned process, with nothing to load."""
    pid = os.fork()
    if pid:
        return pid
    try:
        multiprocessing.forkserver._forkserver._lock = threading.Lock()  # our caller holds the other, for good
        # In place of the caller's files, whose objects here may yet close their numbers, but not what has them next.
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in {int(one.name) for one in Path("/proc/self/fd").iterdir()} - {0, 1, 2, nothing, *descriptors}:
            os.dup2(nothing, number, inheritable=False)
        sys.argv = arguments[arguments.index("-c") :]  # where a spawned process finds that it is one
        exec(sys.argv.pop(1), {})
    except SystemExit:
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    os._exit(1)
