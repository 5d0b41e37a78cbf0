"""A worker's side of a parameter server: gradients go out in shards, parameters come back."""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import torch

from paceline.algorithms.server.codec import Codec, NoCodec
from paceline.errors import PeerLostError, WorkerLostError
from paceline.optimizers import OptimizerSettings
from paceline.transport.base import Message, PeerBack, PeerLeft, Ports, Received

__all__ = ["Answer", "Client"]

_RETURN_DEADLINE_S = 60.0  # for a server that takes a dead one's place
_FINAL = -1  # the number of the last request


class Answer(NamedTuple):
    """What became of an update, as the first shard tells it."""

    applied_version: int  # -1: it was dropped
    version: int  # that the parameters in `Client.x` are


class Client:
    """Sends updates to all shards and waits for their answers.

    A server that dies is waited for: once another takes its place, it is sent again what was not answered. It knows by the
    sequence number whether it has applied that already.

    Args:
        ports: the worker's; `ports.shared.x` (P,) becomes what the servers send.
        codec: what gradients look like on their way.
        aligned: whether all shards' parameters must be of one version: where a step is the same for all of them.

    Attributes:
        x: the parameters (P,).
        version: theirs, as the first shard counts.
        sequence: number of the last update, from 1.
    """

    def __init__(self, ports: Ports, codec: Codec | None = None, *, aligned: bool = False) -> None:
        assert ports.mailbox is not None
        self.x = ports.shared.x
        self.version = 0
        self.sequence = 0
        self._mailbox = ports.mailbox
        self._servers = range(ports.num_workers, ports.num_workers + ports.num_servers)
        self._ranges = ports.shared.ranges
        self._versions = [0] * len(self._servers)
        self._codec = codec if codec is not None else NoCodec()
        self._memories = [self._codec.start(end - begin, self.x.dtype) for begin, end in self._ranges]
        self._echoes: list[torch.Tensor | None] = [None] * len(self._servers)
        self._settings: OptimizerSettings | None = None
        self._told: Message | None = None
        self._aligned = aligned
        self._num_fetches = 0

    def join(self) -> None:
        """Takes part from now on; waits for the parameters."""
        self._exchange([Message("join") for _ in self._servers])

    def tell(self, settings: OptimizerSettings) -> None:
        """Tells the servers which optimizer applies this worker's gradients, where that has changed."""
        if settings != self._settings:
            self._settings = settings
            self._told = Message("settings", x=settings.to_tensor())
            for server in self._servers:
                with contextlib.suppress(PeerLostError):  # it is told again when it is back
                    self._mailbox.send(server, self._told)

    def push(self, gradient: torch.Tensor, num_samples: int, *, fetch: bool = True) -> Answer:
        """Sends a gradient (P,), the mean over so many samples, and waits for the parameters for the next one.

        Without `fetch` it waits for the decision on the gradient alone: `x` and `version` stay as they are.
        """
        self.sequence += 1
        kind = "push" if fetch else "push-only"
        return self._exchange(
            [
                Message(kind, self.sequence, num_samples, self._coded(shard, gradient), version)
                for shard, version in enumerate(self._versions)
            ]
        )

    def fetch(self) -> None:
        """Waits for the newest parameters."""
        self._num_fetches += 1
        self._exchange([Message("fetch", _FINAL - self._num_fetches) for _ in self._servers])

    def _coded(self, shard: int, gradient: torch.Tensor) -> torch.Tensor:
        part = gradient[slice(*self._ranges[shard])]
        return self._codec.encode(part, self._memories[shard]).x if part.numel() else part

    def leave(self) -> None:
        """Says goodbye: no server waits for this worker from now on."""
        for server in self._servers:
            with contextlib.suppress(PeerLostError):
                self._mailbox.send(server, Message("bye", self.sequence))

    def final(self) -> None:
        """Waits for the parameters as they are once all workers have said goodbye."""
        self._exchange([Message("final", _FINAL) for _ in self._servers])

    def _exchange(self, messages: list[Message]) -> Answer:
        # The first shard last: where it chooses whose gradients count, the others have this one already.
        for shard in reversed(range(len(self._servers))):
            with contextlib.suppress(PeerLostError):  # sent again when it is back
                self._send(shard, messages[shard])
        answers = [self._answer(shard, server, messages[shard]) for shard, server in enumerate(self._servers)]
        if self._aligned:
            self._align()
        self.version = self._versions[0]
        return answers[0]

    def _align(self) -> None:
        """Fetches again from shards that were a step behind another: they had refused this worker's gradient before that."""
        while (newest := max(self._versions)) != min(self._versions):
            self._num_fetches += 1
            fetch = Message("fetch", _FINAL - self._num_fetches, version=newest)
            behind = [shard for shard, version in enumerate(self._versions) if version < newest]
            for shard in behind:
                with contextlib.suppress(PeerLostError):
                    self._mailbox.send(self._servers[shard], fetch)
            for shard in behind:
                self._answer(shard, self._servers[shard], fetch)

    def _send(self, shard: int, message: Message) -> None:
        echo = self._echoes[shard]
        if echo is not None and message.kind in ("push", "push-only"):
            self._mailbox.send(self._servers[shard], Message("echo", message.number, x=echo))
        self._mailbox.send(self._servers[shard], message)

    def _answer(self, shard: int, server: int, message: Message) -> Answer:
        left: PeerLeft | None = None
        while True:
            match self._mailbox.receive(_RETURN_DEADLINE_S if left is not None else None, sender=server):
                case Received(message=Message(kind="echo", x=echo)):
                    self._echoes[shard] = echo
                case Received(message=Message(kind="x", number=number, weight=applied, x=x, version=version)):
                    left = None
                    if number != message.number or x is None:  # an answer given twice
                        continue
                    self.x[slice(*self._ranges[shard])] = x
                    self._versions[shard] = version
                    return Answer(int(applied), version)
                case Received(message=Message(kind="ack", number=number, weight=applied, version=version)):
                    left = None
                    if number == message.number:
                        return Answer(int(applied), version)
                case PeerBack():
                    left = None
                    with contextlib.suppress(PeerLostError):
                        if self._told is not None:
                            self._mailbox.send(server, self._told)
                        self._send(shard, message)
                case PeerLeft(reason=reason) as event if left is None and reason != "ended":
                    left = event
                case None | PeerLeft():
                    why = left.reason if left is not None else "its program has ended"
                    raise WorkerLostError(
                        f"Shard {shard} of the parameter server has left ({why}) and nobody took its place."
                    )
                case _:
                    pass
