"""Real worker processes for the tests of shared memory."""

import multiprocessing
import signal

import pytest

import forked
from memory import programs

DEADLINE_S = forked.AGAINST_HANGS_S


class Workers:
    """Starts worker programs in processes of their own and sees to it that none outlives the test."""

    def __init__(self):
        self._context = multiprocessing.get_context("forkserver")
        self.processes = []

    def start(self, program, *arguments, fail_point=""):
        process = self._context.Process(target=programs.run, args=(program.__name__, fail_point, arguments))
        process.start()
        self.processes.append(process)
        return process

    def join(self):
        """Waits for all; each must have ended well."""
        for process in self.processes:
            process.join(DEADLINE_S)
            assert process.exitcode == 0, f"{process.name} ended with {process.exitcode}"

    def run_killed(self, program, *arguments, fail_point):
        """Runs one program that must be killed by its fail point."""
        process = self.start(program, *arguments, fail_point=fail_point)
        process.join(DEADLINE_S)
        assert process.exitcode == -signal.SIGKILL, f"ended with {process.exitcode} and not at {fail_point}"
        self.processes.remove(process)

    def end(self):
        for process in self.processes:
            process.kill()
            process.join()
            process.close()


@pytest.fixture
def workers():
    workers = Workers()
    yield workers
    workers.end()
