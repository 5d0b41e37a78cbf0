"""A stand-in for a GPU's copies, on the CPU: each is made as late as a GPU may make it, so that a missing wait shows."""

import contextlib
import threading

import pytest
import torch

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU that PyTorch can use")
LATER = 3  # how many questions a copy answers with "not yet"


class LazyCopies:
    """Implements `DeviceCopies`: the device's vectors are the CPU's.

    A GPU may read what it fetches until the copy is waited for, and a pinned buffer until the copy from it is done: both are
    read then, and not before.
    """

    device_name = None  # so that collectives are the CPU's

    def __init__(self):
        self.num_pinned = 0
        self.streams = []  # the threads that asked for the stream of the one that made `here`

    def pinned(self, numel, dtype):
        self.num_pinned += 1
        return torch.full((numel,), 77, dtype=dtype)

    def fetch(self, x, pinned):
        return LazyCopy(pinned, x)

    def put(self, pinned):
        x = torch.full_like(pinned, 66)
        return x, LazyCopy(x, pinned)

    def here(self):
        @contextlib.contextmanager
        def stream():
            self.streams.append(threading.current_thread().name)
            yield

        return stream


class LazyCopy:
    def __init__(self, target, source):
        self._target, self._source = target, source
        self._read = None  # what later work on the device has seen
        self._questions = 0

    def wait(self):
        self._target.copy_(self._source)

    def precede(self):
        self._target.copy_(self._source)
        self._read = self._source.clone()

    def is_done(self):
        self._questions += 1
        if self._questions <= LATER:
            return False
        assert self._read is None or torch.equal(self._read, self._source), (
            "a buffer was written again while it was read"
        )
        return True
