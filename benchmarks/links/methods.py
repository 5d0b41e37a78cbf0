"""Who trains on slow links, and what each is told."""

from __future__ import annotations

import json
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Method:
    """A system's method.

    Args:
        system: whose it is.
        program: which of `worker.py`'s loops.
        spec: what the loop is told.
        full: trained to the target on the links of 100 Mbit/s; of the others only a step is timed there.
        hidden: its average takes place beside steps: its step is compared to one without communication.
        every: steps from one average to the next. The first two averages are not in a step's time, as what the first one
            makes wait may be a step after the second; and whole periods are timed.
        asynchronous: how often workers average depends on the links, so that updates to the target on unshaped links say
            nothing about slow ones.
        workers: how many.
    """

    system: str
    program: str
    spec: str
    full: bool = False
    hidden: bool = False
    every: int = 1
    asynchronous: bool = False
    workers: int = 4

    @property
    def warm_up(self) -> int:
        """Steps that are not timed."""
        return max(4, 2 * self.every)

    @property
    def timed(self) -> int:
        """Steps that are, where only a step's time is asked for."""
        return max(10, 2 * self.every)


def _ours(spec: str, *, full: bool = False, hidden: bool = False, every: int = 1) -> Method:
    return Method(system="Paceline", program="paceline", spec=spec, full=full, hidden=hidden, every=every)


def _torch(spec: str, *, full: bool = False) -> Method:
    return Method(system="PyTorch", program="ddp", spec=spec, full=full)


#: The controls: workers whose models are averaged only for the evaluation, and a single worker.
SILENT, ALONE = "no communication", "one worker alone"
#: The best setting of torchft's DiLoCo on CPUs: fragments and a delay as ours has; its quantisation needs a GPU.
FRAGMENTS = "torchft DiLoCo in 4 fragments"

METHODS = {
    "DistributedDataParallel": _torch("plain", full=True),
    "DDP, fp16": _torch("fp16"),
    "DDP, PowerSGD rank 4": _torch("power-4", full=True),
    "torchft DiLoCo": Method(
        system="torchft",
        program="torchft",
        spec=json.dumps({"period": 20, "fragments": 1, "delay": 0}),
        full=True,
        every=20,
    ),
    FRAGMENTS: Method(
        system="torchft",
        program="torchft",
        spec=json.dumps({"period": 20, "fragments": 4, "delay": 4}),
        full=True,
        hidden=True,
        every=20,
    ),
    SILENT: _ours("local-sgd(period=1000000)", full=True, every=20),
    ALONE: Method(system="Paceline", program="paceline", spec="sequential", full=True, workers=1),
    "all-reduce": _ours("all-reduce"),
    "all-reduce, fp16": _ours("all-reduce(codec=fp16)"),
    "all-reduce, qsgd of 4 bits": _ours("all-reduce(codec=qsgd(bits=4))"),
    "all-reduce, dq of 4 bits": _ours("all-reduce(codec=dq(target_bits=4))", full=True),
    # As soon as DDP's: by default ours sends 50 steps as they are.
    "all-reduce, power of rank 4": _ours("all-reduce(codec=power(rank=4,warmup_steps=2))", full=True),
    "local-sgd": _ours("local-sgd(period=20)", every=20),
    "da-sgd": _ours("da-sgd(period=20,delay=16,merge=corrected)", full=True, hidden=True, every=20),
    # 100 Mbit/s carry one average in 1.4 s: 32 late steps cover that, 16 do not.
    "da-sgd, half as often": _ours("da-sgd(period=40,delay=32,merge=corrected)", hidden=True, every=40),
    "diloco in 4 fragments": _ours("diloco(period=20,fragments=4,delay=4)", full=True, hidden=True, every=20),
    "diloco in 4 fragments of 4 bits": _ours(
        "diloco(period=20,fragments=4,delay=4,codec=qsgd(bits=4))", full=True, hidden=True, every=20
    ),
    "ad-psgd": Method(system="Paceline", program="paceline", spec="ad-psgd", full=True, every=20, asynchronous=True),
}
