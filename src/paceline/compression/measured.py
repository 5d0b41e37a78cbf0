"""The cost of coding in simulated time: the codec's own constants, or a machine's measurements."""

from __future__ import annotations

from typing import Any, NamedTuple

from paceline.compression.codec import Codec, NoCodec
from paceline.compression.registry import codec_registry
from paceline.ports.ports import Ports

__all__ = ["Moves", "measured_moves", "moves_in", "moves_of"]


class Moves(NamedTuple):
    """Times, in reads and writes of the coded vector."""

    encoding: float
    decoding: float


def moves_of(codec: Codec) -> Moves:
    """The codec's own constants."""
    return Moves(codec.encoding_moves, codec.decoding_moves)


def measured_moves(codec: Codec, ports: Ports[Any]) -> Moves | None:
    """The measurement for codecs of this name, with any arguments; None: not measured."""
    if not ports.codec_moves or isinstance(codec, NoCodec):
        return None
    found = ports.codec_moves.get(codec_registry.name_of(type(codec)))
    return None if found is None else Moves(*found)


def moves_in(ports: Ports[Any], codec: Codec) -> Moves:
    """The measurement, or the codec's own constants if there is none."""
    return measured_moves(codec, ports) or moves_of(codec)
