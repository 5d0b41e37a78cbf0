"""Stand-ins for a GPU.

`LazyCopies`, on the CPU: each copy is made as late as a GPU may make it, so that a missing wait shows. `MetaCopies`, on
PyTorch's `meta` device, which has no values: an operation on tensors of both devices raises an error, as on a GPU.
"""

import contextlib
import threading

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU that PyTorch can use")
LATER = 3  # how many questions a copy answers with "not yet"


class LazyCopies:
    """Stands for `CudaCopies`: the device's vectors are the CPU's.

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
    """Stands for `CudaCopies` for `meta`; what is fetched is zero."""

    device = torch.device("meta")

    def fetch(self, x, pinned):
        assert x.is_meta
        assert not pinned.is_meta
        return LazyCopy(pinned, torch.zeros_like(pinned))

    def put(self, pinned):
        x = torch.empty_like(pinned, device="meta")
        return x, LazyCopy(x, pinned)

    def here(self):
        return MetaValues


class MetaValues(TorchDispatchMode):
    """Copies from `meta`, which PyTorch refuses, give zeros, and numbers are 1 there; operations on both devices raise."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, operation = kwargs or {}, func.overloadpacket
        own, *others = args or (None,)
        if operation in (aten.copy_, aten._foreach_copy_):
            given = [
                (to, of) for to, of in zip(*map(_listed, (own, others[0])), strict=True) if to.is_meta != of.is_meta
            ]
            for to, of in given:
                assert to.shape == of.shape
                to.zero_()
            if not given:
                return func(*args, **kwargs)
            return own if operation is aten.copy_ else None
        if operation is aten._to_copy and own.is_meta and str(kwargs.get("device")) == "cpu":
            return torch.zeros_like(own, dtype=kwargs.get("dtype"), device="cpu")
        if operation is aten._local_scalar_dense and own.is_meta:
            return torch.ones((), dtype=own.dtype).item()  # a sum of weights, for one
        tensors = [
            one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor) and (one.dim() or one.is_meta)
        ]
        assert len({one.is_meta for one in tensors}) < 2, f"{func} has tensors of the device and of the host"
        return func(*args, **kwargs)


def _listed(one):
    return [one] if isinstance(one, torch.Tensor) else one
