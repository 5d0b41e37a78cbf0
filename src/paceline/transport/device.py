"""Vectors on a GPU: copies to and from pinned memory, and the ports of a worker whose parameters lie there.

A copy to or from a GPU overlaps with computation only if it uses pinned memory and its own stream. Pinned memory is slow to
allocate, so buffers are kept; streams are not ordered among themselves, so every copy says what it waits for and what waits
for it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Unpack

import torch

from paceline.errors import UsageError
from paceline.ports.ports import NO_NUMBERS, Collectives, Event, Filter, Handle, Mailbox, Message, Received
from paceline.system.torch_internals import tree_map

_MOST_LENGTHS = 1_000  # of pinned vectors that are kept


def device_copies(device: torch.device) -> CudaCopies | None:
    """The copies for vectors on this device, which must be a CPU or CUDA device; None: it is the CPU."""
    if device.type == "cpu":
        return None
    if device.type == "cuda":
        return CudaCopies(device)
    raise UsageError(
        f"Models train on the CPU or on CUDA GPUs, but this one is on {device}: move it with model.cpu() or "
        "model.cuda()."
    )


def gpu_of(worker: int) -> dict[str, str]:
    """The variable that makes the k-th GPU, in turn, the only one of a machine's k-th worker; read as CUDA is first used."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = [str(n) for n in range(torch.cuda.device_count())] if named is None else named.split(",")
    return {"CUDA_VISIBLE_DEVICES": gpus[worker % len(gpus)]} if len(gpus) > 1 else {}


def moving_to(device: torch.device) -> Callable[[Any], Any]:
    """A function that moves a batch's tensors, and what else has a method `to`, to the device.

    Tensors are copied to a GPU while that still computes, if their memory is pinned.

    Raises:
        UsageError: PyTorch finds no GPU.
    """

    def move_plainly(one: Any) -> Any:
        return one.to(device) if hasattr(one, "to") else one

    if device.type != "cuda":
        return lambda batch: tree_map(move_plainly, batch)
    if not torch.cuda.is_available():
        raise UsageError(f"Batches cannot be moved to {device}, as PyTorch finds no GPU here: choose another device.")
    beside = torch.cuda.Stream(device)

    def move_beside(one: Any) -> Any:
        return one.to(device, non_blocking=True) if isinstance(one, torch.Tensor) else one

    def move(batch: Any) -> Any:
        with torch.cuda.stream(beside):
            batch = tree_map(move_beside, batch)
        current = torch.cuda.current_stream(device)
        current.wait_stream(beside)
        tree_map(lambda one: one.record_stream(current) if isinstance(one, torch.Tensor) else None, batch)
        return tree_map(move_plainly, batch)

    return move


class CudaCopies:
    """Copies between a GPU and the host, on two streams besides the computing one: one for each direction."""

    def __init__(self, device: torch.device) -> None:
        self.device = device  # where the vectors are
        self.device_name = str(torch.cuda.get_device_properties(device).uuid)  # unique to the device
        self._down, self._up = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def pinned(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A new vector (n,) in pinned memory of the host."""
        with torch.cuda.device(self.device):
            return torch.empty(numel, dtype=dtype, pin_memory=True)

    def fetch(self, x: torch.Tensor, pinned: torch.Tensor) -> _Copy:
        """Begins copying the device's `x` (n,), after all work that its current stream has so far."""
        self._down.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._down):
            pinned.copy_(x, non_blocking=True)
        x.record_stream(self._down)
        return _Copy(self._down.record_event(), x)

    def put(self, pinned: torch.Tensor) -> tuple[torch.Tensor, _Copy]:
        """Begins copying to a new vector (n,) on the device, which may be used after `precede`."""
        # Without waiting for the current stream, which does not use the new vector yet.
        with torch.cuda.stream(self._up):
            x = torch.empty(pinned.numel(), dtype=pinned.dtype, device=self.device)
            x.copy_(pinned, non_blocking=True)
        return x, _Copy(self._up.record_event(), x)

    def here(self) -> Callable[[], AbstractContextManager[Any]]:
        """A function that returns context managers, which make the stream that is current now current in another thread."""
        stream = torch.cuda.current_stream(self.device)
        return lambda: torch.cuda.stream(stream)


@dataclass
class _Copy:
    """A copy under way."""

    event: Any  # torch.cuda.Event, which its type stubs give two names
    x: torch.Tensor | None  # the vector on the GPU, until it is known which stream uses it

    def wait(self) -> None:
        self.event.synchronize()

    def is_done(self) -> bool:
        return self.event.query()

    def precede(self) -> None:
        """Makes later work on this thread's current stream wait for the copy; returns at once."""
        assert self.x is not None
        stream = torch.cuda.current_stream(self.x.device)
        stream.wait_event(self.event)
        self.x.record_stream(stream)
        self.x = None


class _PinnedBuffers:
    def __init__(self, copies: CudaCopies) -> None:
        self._copies = copies
        self._lock = threading.Lock()  # a worker's programs send and receive at the same time
        self._free: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}
        self._used: list[tuple[_Copy, torch.Tensor]] = []  # that copies to the device may still read

    def take(self, like: torch.Tensor) -> torch.Tensor:
        with self._lock:
            still_used = []
            for copy, pinned in self._used:
                if copy.is_done():
                    self._free.setdefault((pinned.numel(), pinned.dtype), []).append(pinned)
                else:
                    still_used.append((copy, pinned))
            self._used = still_used
            free = self._free.get((like.numel(), like.dtype))
            if free:
                return free.pop()
            if len(self._free) > _MOST_LENGTHS:  # as each round's rows have another one
                self._free.clear()
        return self._copies.pinned(like.numel(), like.dtype)

    def fetch(self, x: torch.Tensor) -> torch.Tensor:
        """The device's `x` (n,) in a buffer, once it is there."""
        pinned = self.take(x)
        self._copies.fetch(x.detach(), pinned).wait()
        return pinned

    def put(self, pinned: torch.Tensor) -> torch.Tensor:
        """Copies a buffer to a new vector on the device, and takes the buffer back; the host does not wait."""
        x, copy = self._copies.put(pinned)
        copy.precede()
        with self._lock:
            self._used.append((copy, pinned))
        return x

    def give_back(self, pinned: torch.Tensor) -> None:
        with self._lock:
            self._free.setdefault((pinned.numel(), pinned.dtype), []).append(pinned)


class StagedMailbox:
    """A mailbox for vectors of a device, over one for vectors of the host; implements `Mailbox`.

    Vectors arrive on the device; those of the host can be sent, too. Costs per vector of the device: one copy over the bus and
    one in host memory. Incoming vectors are copied to the device while it computes. `send` returns when the vector has left
    the device, so the host waits for all earlier work on the current stream: a program should not hold a lock meanwhile.
    """

    def __init__(self, inner: Mailbox, copies: CudaCopies) -> None:
        self._inner = inner
        self._device = copies.device
        self._buffers = _PinnedBuffers(copies)

    def send(self, to: int, message: Message) -> None:
        x = message.x
        if x is None or x.device != self._device:
            self._inner.send(to, message)
            return
        pinned = self._buffers.fetch(x)
        try:
            self._inner.send(to, message._replace(x=pinned))
        finally:
            self._buffers.give_back(pinned)

    def receive(self, timeout_s: float | None = None, **wanted: Unpack[Filter]) -> Event | None:
        event = self._inner.receive(timeout_s, **wanted)
        if not isinstance(event, Received) or event.message.x is None:
            return event
        pinned = self._buffers.take(event.message.x)
        pinned.copy_(event.message.x)
        return event._replace(message=event.message._replace(x=self._buffers.put(pinned)))

    def peers(self) -> Set[int]:
        return self._inner.peers()


class StagedCollectives:
    """Sums and means of vectors of a device, over collectives of the host; implements `Collectives` for these two.

    Vectors of the host are passed on. A started operation begins when its vector has left the device: the host waits for all
    earlier work on the current stream, and the device then idles until the host launches more.
    """

    def __init__(self, inner: Collectives, copies: CudaCopies) -> None:
        self._inner = inner
        self._device = copies.device
        self._buffers = _PinnedBuffers(copies)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)  # gathering, of which codecs make use, on the host alone; `members`

    @property
    def waited_s(self) -> float:
        return self._inner.waited_s  # pyright: ignore[reportAttributeAccessIssue]  # of all that are not simulated

    @waited_s.setter
    def waited_s(self, seconds: float) -> None:
        self._inner.waited_s = seconds  # pyright: ignore[reportAttributeAccessIssue]

    def all_reduce_mean(
        self, vector: torch.Tensor, weight: float, numbers: Sequence[float] = NO_NUMBERS
    ) -> list[float]:
        if vector.device != self._device:
            return self._inner.all_reduce_mean(vector, weight, numbers)
        pinned = self._buffers.fetch(vector)
        totals = self._inner.all_reduce_mean(pinned, weight, numbers)
        vector.copy_(self._buffers.put(pinned))
        return totals

    def start_all_reduce(self, vector: torch.Tensor) -> Handle:
        if vector.device != self._device:
            return self._inner.start_all_reduce(vector)
        pinned = self._buffers.fetch(vector)
        return _StagedHandle(self._inner.start_all_reduce(pinned), vector, pinned, self._buffers)


@dataclass
class _StagedHandle:
    """An operation on the host, whose result goes to the device."""

    inner: Handle
    vector: torch.Tensor
    pinned: torch.Tensor | None
    buffers: _PinnedBuffers

    def wait(self) -> Sequence[int]:
        members = self.inner.wait()
        if self.pinned is not None:
            self.vector.copy_(self.buffers.put(self.pinned))
            self.pinned = None
        return members
