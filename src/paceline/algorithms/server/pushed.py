"""Gradients pushed to servers: coded per shard, with error feedback."""

from __future__ import annotations

import warnings
from typing import Any

from torch import Tensor

from paceline.compression.codec import WHAT, Codec, NoCodec, NotFiniteError, key_of, share_of
from paceline.compression.feedback import Feedback
from paceline.compression.measured import moves_in
from paceline.errors import AlgorithmWarning, NotFiniteWarning
from paceline.optim.half_types import is_finite
from paceline.optim.ranges import Ranges, within
from paceline.ports.ports import Ports
from paceline.ports.shared import ServedParameters
from paceline.system.saved_state import check_fits


class PushCodec:
    """A worker's codec.

    Each gradient is coded once, however often it is sent, and updates a shard's error feedback once that shard has taken it. A
    gradient that is not finite is replaced by zeros. Checkpoints include the error feedback; a dead worker's replacement
    starts without.
    """

    def __init__(self, codec: Codec, ports: Ports[ServedParameters]) -> None:
        self._ports = ports
        self._codec = codec
        self._ranges = ports.shared.ranges
        self._is_plain = isinstance(codec, NoCodec)
        self._tuner = codec.tuner()
        self._moves = moves_in(ports, codec)
        dtype = ports.shared.x.dtype
        self.feedbacks = [Feedback(codec, end - begin, dtype) for begin, end in self._ranges]
        self._seed = 0 if self._is_plain else key_of(ports.random.getrandbits(63), ports.incarnation)
        self._count = 0
        self._has_warned = False
        if ports.incarnation and codec.remembers:
            warnings.warn(
                f"Worker {ports.worker_id} replaces a dead worker: the error-feedback memory of the dead worker's "
                "codec is lost.",
                stacklevel=2,
            )
        storage = ports.storage
        if storage is not None and not self._is_plain:
            if not ports.incarnation:
                self._load(storage.restore())
            storage.keep(self._state, 0)

    def encode(self, gradient: Tensor, missing: Ranges = ()) -> list[Tensor]:
        """Codes the gradient (P,) into one payload per shard; sends nothing for `missing` parameters, which have none.

        Codecs work on the CPU, where a gradient of a GPU is copied.
        """
        ports, num_shards = self._ports, len(self._ranges)
        if self._is_plain:
            return [gradient[begin:end] for begin, end in self._ranges]
        begun_s = ports.clock.now_s()
        ports.moved(self._moves.encoding + 2.0 * self._codec.remembers)  # with a copy of the error feedback
        if not gradient.numel():
            coded = getattr(gradient, "coded", None)
            payloads = [gradient if coded is None else coded(share_of(self._tuner.codec))] * num_shards
        else:
            payloads = self._encode(gradient.cpu(), missing)
        ports.counts.codec_s += ports.clock.now_s() - begun_s
        return payloads

    def _encode(self, gradient: Tensor, missing: Ranges) -> list[Tensor]:
        self._count += 1
        key = key_of(self._seed, self._count)
        is_finite_ = is_finite(gradient)
        if is_finite_ and self._tuner.wants_size:
            caution = self._tuner.fit(sum(self._tuner.size_of(gradient[begin:end]) for begin, end in self._ranges))
            if caution:
                warnings.warn(caution, AlgorithmWarning, stacklevel=2)
        codec, parts = self._tuner.codec, [gradient[begin:end] for begin, end in self._ranges]
        try:
            if not is_finite_:
                raise NotFiniteError
            payloads = [
                feedback.encode(codec, part, key_of(key, shard), within(missing, *self._ranges[shard]))
                for shard, (feedback, part) in enumerate(zip(self.feedbacks, parts, strict=True))
            ]
        except NotFiniteError:
            payloads = [codec.encode(part.new_zeros(len(part)), codec.start(len(part), part.dtype)) for part in parts]
            self._left_out()
        self._ports.counts.coded_elements += len(gradient)
        self._ports.counts.coded_bytes += sum(payload.nbytes for payload in payloads)
        return payloads

    def settle(self, shard: int, *, is_applied: bool) -> None:
        """A shard has applied its part of the last gradient, or will, or has dropped it."""
        self.feedbacks[shard].settle(is_applied=is_applied)

    def _left_out(self) -> None:
        for shard in range(len(self.feedbacks)):
            self.settle(shard, is_applied=False)
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"A gradient of worker {self._ports.worker_id} is not finite: zeros are sent instead, and its codec's "
                "memory stays unchanged. If it happens again, lower the learning rate or clip gradients. This warning "
                "appears once.",
                NotFiniteWarning,
                stacklevel=2,
            )

    def _state(self) -> dict[str, Any]:
        return {
            "codec": repr(self._codec), "ranges": [list(one) for one in self._ranges], "count": self._count,
            "memories": [one.memory for one in self.feedbacks], "tuner": self._tuner.state(),
        }  # fmt: skip

    def _load(self, state: dict[str, Any] | None) -> None:
        if state is None:
            return
        if state.get("codec") != repr(self._codec) or state.get("ranges") != [list(one) for one in self._ranges]:
            warnings.warn(
                "The checkpoint was written with another codec or other shards: its error-feedback memory is ignored.",
                stacklevel=2,
            )
            return
        check_fits(state, self._state(), WHAT)
        self._count = state["count"]
        for own, before in zip(self.feedbacks, state["memories"], strict=True):
            if own.memory is not None:
                own.memory.copy_(before)
        if state["tuner"]:
            self._tuner.load(state["tuner"])
