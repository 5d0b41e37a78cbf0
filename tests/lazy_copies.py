"""Stand-ins for a GPU.

`LazyCopies`, on the CPU: each copy is made as late as a GPU may make it, so that a missing wait shows. `MetaCopies`, on
PyTorch's `meta` device, which has no values: an operation on tensors of both devices raises an error, as on a GPU.
"""

import contextlib
import threading

import pytest
import torch
from torch.overrides import TorchFunctionMode

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU that PyTorch can use")
LATER = 3  # how many questions a copy answers with "not yet"


class LazyCopies:
    """Implements `DeviceCopies`: the device's vectors are the CPU's.

    A GPU may read what it fetches until the copy is waited for, and a pinned buffer until the copy from it is done: both are
    read then, and not before.
    """

    device = torch.device("cpu")
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


class MetaCopies(LazyCopies):
    """Implements `DeviceCopies` for `meta`; what is fetched is zero."""

    device = torch.device("meta")

    def fetch(self, x, pinned):
        assert x.is_meta
        assert not pinned.is_meta
        return LazyCopy(pinned, torch.zeros_like(pinned))

    def put(self, pinned):
        x = torch.empty_like(pinned, device="meta")
        return x, LazyCopy(x, pinned)


class MetaValues(TorchFunctionMode):
    """Copies from `meta` to the CPU, which PyTorch refuses, give zeros."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        own, *others = args or (None,)
        is_meta = isinstance(own, torch.Tensor) and own.is_meta
        if func is torch.Tensor.copy_ and not is_meta and others[0].is_meta:
            return own.zero_()
        if func is torch._foreach_copy_ and not own[0].is_meta and others[0][0].is_meta:
            return torch._foreach_zero_(own)
        to_cpu = func is torch.Tensor.cpu or (
            func is torch.Tensor.to and "cpu" in map(str, (*others, *kwargs.values()))
        )
        if is_meta and to_cpu:
            return torch.zeros(own.shape, dtype=own.dtype)
        if is_meta and func in (torch.Tensor.item, torch.Tensor.__float__, torch.Tensor.tolist, torch.Tensor.__bool__):
            return func(torch.zeros(own.shape, dtype=own.dtype))
        return func(*args, **kwargs)
