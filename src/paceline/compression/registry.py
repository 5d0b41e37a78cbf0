"""The names of codecs in specs, `codec=qsgd(bits=4)`; which codecs a carrier does not support, and why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from paceline.compression.bf16 import BFloat16
from paceline.compression.codec import Codec, NoCodec
from paceline.compression.dq import DQ
from paceline.compression.fp16 import Float16
from paceline.compression.power import Power
from paceline.compression.qsgd import QSGD
from paceline.compression.sign import Sign
from paceline.compression.ternary import Ternary
from paceline.compression.top_k import TopK
from paceline.errors import UsageError
from paceline.specs.registry import Registry

codec_registry = Registry("codec")
codec_registry.register("none", NoCodec)
codec_registry.register("fp16", Float16)
codec_registry.register("bf16", BFloat16)
codec_registry.register("qsgd", QSGD)
codec_registry.register("dq", DQ)
codec_registry.register("ternary", Ternary)
codec_registry.register("sign", Sign)
codec_registry.register("top-k", TopK)
codec_registry.register("power", Power)


def probed_codecs() -> list[str]:
    """The codecs whose speed depends only on a vector's length."""
    return [name for name, cls in codec_registry.items() if cls not in (NoCodec, Power)]


def check_probed(name: str) -> None:
    """Refuses a codec whose speed cannot be measured."""
    if codec_registry[name] in (NoCodec, Power):
        raise UsageError(f"The speed of codec {name} cannot be measured: leave it out.")


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


def check_carrier(codec: Codec, carrier: Carrier, where: str) -> None:
    """Refuses a codec that a carrier does not support."""
    for (refusing, refused), reason in _REFUSED.items():
        if carrier == refusing and isinstance(codec, refused):
            raise UsageError(f"{where} cannot have codec={codec_registry.spec(codec)}: {reason}.")
