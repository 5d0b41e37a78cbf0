"""What coding costs in simulated time: the codec's own constants, or what a machine was measured to take."""

from __future__ import annotations

from typing import Any, NamedTuple

from paceline.compression.codec import Codec, NoCodec
from paceline.compression.registry import codec_registry
from paceline.ports.ports import Ports

__all__ = ["Moves", "measured_moves", "moves_in", "moves_of"]


class Moves(NamedTuple):
    """Times, as reading and writing so many vectors of the one that is coded."""

    encoding: float
    decoding: float


def moves_of(codec: Codec) -> Moves:
    """By the codec's own constants."""
    return Moves(codec.encoding_moves, codec.decoding_moves)


def measured_moves(codec: Codec, ports: Ports[Any]) -> Moves | None:
    """As measured of codecs of this name, whatever their arguments; None: nothing was."""
    if not ports.codec_moves or isinstance(codec, NoCodec):
        return None
    found = ports.codec_moves.get(codec_registry.name_of(type(codec)))
    return None if found is None else Moves(*found)


def moves_in(ports: Ports[Any], codec: Codec) -> Moves:
    """As measured; where nothing was, by the codec's own constants."""
    return measured_moves(codec, ports) or moves_of(codec)
