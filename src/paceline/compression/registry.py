"""The names of codecs in specs: `codec=qsgd(bits=4)`."""

from __future__ import annotations

from paceline.compression.bf16 import BFloat16
from paceline.compression.codec import NoCodec
from paceline.compression.dq import DQ
from paceline.compression.fp16 import Float16
from paceline.compression.power import Power
from paceline.compression.qsgd import QSGD
from paceline.compression.sign import Sign
from paceline.compression.ternary import Ternary
from paceline.compression.top_k import TopK
from paceline.errors import UsageError
from paceline.specs.registry import Registry

__all__ = ["check_probed", "codec_registry", "probed_codecs"]

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
    if codec_registry[name] not in (NoCodec, Power):
        return
    raise UsageError(f"The speed of codec {name} cannot be measured: leave it out.")
