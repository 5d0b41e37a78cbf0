"""Which carrier takes which kind of codec: one table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from paceline.compression.codec import Codec, Kind, NoCodec
from paceline.errors import UsageError

__all__ = ["CARRIERS", "GOSSIP", "Carrier", "check_carrier", "reason_against"]

#: all-to-all: each worker adds up its part of the decoded vectors, codes the sum anew, and all gather the parts.
#: push: to a server, which decodes each by itself. gossip: models of one's own, averaged in pairs.
Carrier = Literal["all-to-all", "push", "gossip"]

GOSSIP = (
    "gossip averages models, not differences that shrink, so that what is lost of them is lost for good: take local-sgd,"
    " all-reduce or parameter-server"
)

#: By carrier and kind: why not; what is empty is taken.
CARRIERS: Mapping[Carrier, Mapping[Kind, str]] = {
    "all-to-all": {"linear": "", "shared scale": "", "unbiased": "", "biased": ""},
    "push": {"linear": "", "shared scale": "", "unbiased": "", "biased": ""},
    "gossip": dict.fromkeys(("linear", "shared scale", "unbiased", "biased"), GOSSIP),
}

#: Codecs that a carrier does not take though it takes their kind.
_EXCEPT: Mapping[tuple[Carrier, str], str] = {
    ("all-to-all", "TopK"): (
        "the sum of several workers' largest elements has as many more elements, and a gather of them grows with the workers:"
        " take parameter-server(codec=top-k), or all-reduce(codec=sign)"
    ),
    ("push", "Power"): "it averages factors among workers, which a server has none to average with: take all-reduce",
}


def reason_against(codec: Codec, carrier: Carrier) -> str:
    """Why a carrier does not take a codec; or empty."""
    if isinstance(codec, NoCodec):
        return ""
    return CARRIERS[carrier][codec.kind] or _EXCEPT.get((carrier, type(codec).__name__), "")


def check_carrier(codec: Codec, carrier: Carrier, where: str, name: str) -> None:
    """Refuses a codec on a carrier that cannot.

    Raises:
        UsageError: with the reason and the remedy.
    """
    if not isinstance(codec, NoCodec) and (reason := reason_against(codec, carrier)):
        raise UsageError(f"{where} cannot have codec={name}: {reason}.")
