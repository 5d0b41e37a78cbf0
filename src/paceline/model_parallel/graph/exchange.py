"""Tensors between the parts of a placed model: over a mailbox, numbered, and cast for the transfer if the plan says so."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from itertools import count
from typing import Any

import torch

from paceline.errors import PeerLostError, WorkerLostError
from paceline.model_parallel.graph.problem import TensorInfo
from paceline.model_parallel.graph.recorder import Recorder
from paceline.ports.ports import Mailbox, Message, PeerBack, PeerLeft, Received
from paceline.system.torch_internals import call_after_backward

#: Formats for float32: unchanged, rounded to the nearest bfloat16, or truncated as published in 2015.
WIRES = ("", "bfloat16", "bfloat16-truncated")
_PLAIN = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8)


def truncated(x: torch.Tensor) -> torch.Tensor:
    """float32 without its lower 16 bits, as bfloat16; a NaN stays a NaN, even if only its lower bits mark it.

    Errors go towards zero: the mean loss is 0.3 %, while rounding is unbiased.
    """
    bits = x.contiguous().view(torch.int32)
    upper = (bits >> 16).to(torch.int16)
    upper = torch.where(torch.isnan(x), upper | 0x40, upper)
    return upper.view(torch.bfloat16)


def to_wire(x: torch.Tensor, wire: str) -> torch.Tensor:
    """The tensor as a flat vector of a type that mailboxes take."""
    x = x.detach()
    if wire and x.dtype == torch.float32:
        x = x.to(torch.bfloat16) if wire == "bfloat16" else truncated(x)
    x = x.contiguous().view(-1)
    return x if x.dtype in _PLAIN else x.view(torch.uint8)


def from_wire(x: torch.Tensor, tensor: TensorInfo, wire: str) -> torch.Tensor:
    """The tensor that `to_wire` was given."""
    dtype = getattr(torch, tensor.dtype)
    if wire and dtype == torch.float32:
        return x.to(dtype).view(tensor.shape)
    return x.view(dtype).view(tensor.shape)


def wire_bytes(shape: tuple[int, ...], dtype: str, wire: str) -> int:
    """The size of a tensor on the wire in bytes."""
    size = getattr(torch, dtype).itemsize
    return math.prod(shape) * (2 if wire and dtype == "float32" else size)


def described(name: str, x: torch.Tensor) -> TensorInfo:
    """A tensor that belongs to no group; it is sent without a cast."""
    return TensorInfo(name, -1, (), 0, is_output=True, shape=tuple(x.shape), dtype=str(x.dtype).removeprefix("torch."))


@dataclass(eq=False)
class Exchange:
    """One worker's messages with the others.

    Attributes:
        sent: messages since the start of the last forward pass, in order: "move" or "return", operation, from, to.
    """

    mailbox: Mailbox
    worker: int
    _: KW_ONLY
    first: int = 0  # the number of worker 0 of these in the run, for error messages
    wire: str = ""  # the type that floats are cast to
    deadline_s: float = 60.0
    slowness: float = 1.0  # artificial factor on this worker's compute time: it sleeps before it sends or waits
    sleep: Callable[[float], object] = time.sleep
    recorder: Recorder | None = None

    def __post_init__(self) -> None:
        self._since_s = time.perf_counter()
        self._is_computing = False
        self._gathered, self._agreed = count(), count()
        self.number_fetched = count().__next__  # of the next value of a partial execution: all workers count alike
        self.sent: list[tuple[str, str, int, int]] = []

    @staticmethod
    def alone() -> Exchange:
        nobody: Any = None
        return Exchange(nobody, 0)

    def begin_forward(self) -> None:
        """A forward pass begins; computation before it belongs to the loop."""
        self.sent = []
        self._go_on()

    def end_forward(self) -> None:
        self._pause()
        self._go_on()

    def begin_backward(self) -> None:
        """A backward pass begins; computation after its last message counts as well."""
        call_after_backward(self._end_backward)

    def _end_backward(self) -> None:
        self._pause()
        if self.recorder is not None:
            self.recorder.end_backward()

    def send(self, to: int, kind: str, number: int, value: torch.Tensor | None, tensor: TensorInfo) -> None:
        """Sends a tensor or its gradient, or, if `value` is None, a message that there is no gradient.

        Raises:
            WorkerLostError: the other has left.
        """
        self._pause()
        self.sent.append((kind, tensor.node, self.worker, to))
        begun_s = time.perf_counter()
        x = None if value is None else to_wire(value, self._wire_of(tensor))
        try:
            self.mailbox.send(to, Message(kind, number, x=x))
        except PeerLostError as error:
            raise self._lost(to, kind, tensor, str(error).rstrip(".")) from error
        if self.recorder is not None:
            self.recorder.message("out", kind, number, tensor, (self.worker, to), begun_s)
        self._go_on()

    def receive(self, sender: int, kind: str, number: int, tensor: TensorInfo) -> Any:
        """Receives the tensor that `sender` has sent under this number; None: it has no gradient.

        Raises:
            WorkerLostError: it has left, or no message arrives within the deadline.
        """
        self._pause()
        begun_s = time.perf_counter()
        while True:
            match self.mailbox.receive(self.deadline_s, kind=kind, sender=sender, number=number):
                case None:
                    raise self._lost(sender, kind, tensor, f"nothing came within {self.deadline_s:g} s")
                case PeerLeft(reason=reason):
                    raise self._lost(sender, kind, tensor, f"it has left ({reason})")
                case Received(message=message):
                    value = None if message.x is None else from_wire(message.x, tensor, self._wire_of(tensor))
                    break
                case PeerBack():
                    pass
        if self.recorder is not None:
            self.recorder.message("in", kind, number, tensor, (sender, self.worker), begun_s)
        self._go_on()
        return value

    def gather(self, x: torch.Tensor, workers: int, what: str = "the norms of its gradients") -> list[torch.Tensor]:
        """All workers' vectors, of one length, in the workers' order; all workers call it together."""
        about, number = described(what, x), next(self._gathered)
        others = [one for one in range(workers) if one != self.worker]
        for to in others:
            self.send(to, "norms", number, x, about)
        found = {one: self.receive(one, "norms", number, about) for one in others}
        return [found.get(one, x) for one in range(workers)]

    def agreed(self, find: Callable[[], int], workers: int) -> int:
        """The number that the first worker finds, on all; all workers call it together."""
        about = TensorInfo("the next batch", -1, (), 0, is_output=True, shape=(1,), dtype="int64")
        number, self._is_computing = next(self._agreed), False
        if self.worker:
            return int(self.receive(0, "agreed", number, about))
        found = torch.tensor([find()])
        for to in range(1, workers):
            self.send(to, "agreed", number, found, about)
        return int(found)

    def _wire_of(self, tensor: TensorInfo) -> str:
        """The cast for a tensor; the model's output is not cast: every worker must compute the same loss."""
        return "" if tensor.is_output else self.wire

    def _pause(self) -> None:
        """Computation pauses for a message: an artificially slow worker sleeps here for its extra time."""
        if self._is_computing and self.slowness > 1:
            self.sleep((self.slowness - 1) * (time.perf_counter() - self._since_s))
        self._is_computing = False

    def _go_on(self) -> None:
        self._since_s, self._is_computing = time.perf_counter(), True

    def _lost(self, worker: int, kind: str, tensor: TensorInfo, why: str) -> WorkerLostError:
        what = f"{tensor.node}'s gradient" if kind == "return" else tensor.node
        return WorkerLostError(
            f"Worker {self.first + self.worker} waited for worker {self.first + worker}, which has part of the model,"
            f" over {what}: {why}. The step has ended on all workers; resume from the newest checkpoint, if there is one, and"
            " make a plan for the remaining workers with plan.again(devices=...)."
        )
