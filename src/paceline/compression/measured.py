"""The cost of coding in simulated time: a machine's measurements, or the codec's own constants."""

from __future__ import annotations

from typing import Any

from paceline.compression.codec import Codec, Moves, NoCodec
from paceline.compression.registry import codec_registry
from paceline.ports.ports import Ports


def measured_moves(codec: Codec, ports: Ports[Any]) -> Moves | None:
    """The measurement for codecs of this name, with any arguments; None: not measured."""
    if not ports.codec_moves or isinstance(codec, NoCodec):
        return None
    found = ports.codec_moves.get(codec_registry.name_of(type(codec)))
    return None if found is None else Moves(*found)


def moves_in(ports: Ports[Any], codec: Codec) -> Moves:
    """The measurement, or the codec's own constants if there is none."""
    return measured_moves(codec, ports) or codec.moves
