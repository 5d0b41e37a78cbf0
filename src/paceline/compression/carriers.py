"""Which codecs a carrier does not support, and why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from paceline.compression.codec import Codec
from paceline.compression.power import Power
from paceline.compression.top_k import TopK
from paceline.errors import UsageError

__all__ = ["GOSSIP", "Carrier", "check_carrier"]

#: all-to-all: each worker adds up its part of the decoded vectors, re-encodes the sum, and all gather the parts.
#: push: to a server, which decodes each separately.
Carrier = Literal["all-to-all", "push"]

#: Why gossip algorithms take no codec.
GOSSIP = (
    "gossip averages models, not differences that shrink, so rounding errors would never be corrected: use local-sgd,"
    " all-reduce or parameter-server"
)

_REFUSED: Mapping[tuple[Carrier, type[Codec]], str] = {
    ("all-to-all", TopK): (
        "the sum of several workers' largest elements has more elements, and gathering them costs more with each worker:"
        " use parameter-server(codec=top-k), or all-reduce(codec=sign)"
    ),
    ("push", Power): "it averages factors among workers, but a server has no others to average with: use all-reduce",
}


def check_carrier(codec: Codec, carrier: Carrier, where: str, name: str) -> None:
    """Refuses a codec that a carrier does not support."""
    for (refusing, refused), reason in _REFUSED.items():
        if carrier == refusing and isinstance(codec, refused):
            raise UsageError(f"{where} cannot have codec={name}: {reason}.")
