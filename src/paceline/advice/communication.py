"""Whether a codec pays: the time of coding against the time of the bytes that it saves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.advice.answer import Candidate
from paceline.advice.machine import with_workers
from paceline.advice.program import Shape
from paceline.algorithms import registry
from paceline.compression.codec import Codec, NoCodec
from paceline.compression.power import Power
from paceline.compression.registry import codec_registry
from paceline.observe.words import number_text, seconds_text, workers_text
from paceline.simulator import Cluster
from paceline.simulator.network_collectives import CollectiveCosts

__all__ = ["CODED", "Balance", "balance", "weighed", "words"]

CODED = ("all-reduce(codec=qsgd)",)
_ELEMENT_BYTES = 4  # float32
_LONG = 2**20  # elements
_IN_MEMORY = 5.0  # vectors that a mean of one machine's workers moves: in, all parts read, one written, out


@dataclass(frozen=True, kw_only=True, slots=True)
class Balance:
    """One step's mean of all gradients, as it is and through a codec; seconds.

    Args:
        over: what the bytes go over, in words.
    """

    algorithm: str
    workers: int
    num_bytes: int
    plain_s: float
    coded_s: float
    coding_s: float
    step_s: float
    over: str

    @property
    def pays(self) -> bool:
        return self.coding_s < self.plain_s - self.coded_s


def balance(algorithm: str, cluster: Cluster, shape: Shape, workers: int) -> Balance:
    """The balance of `all-reduce` with a codec by the simulator's formulas, without overlap with computation.

    Over a network a mean is a ring's; where all share a machine, their memory's, whose bus they share.
    """
    codec: Codec = registry.build(algorithm).codec
    cluster = with_workers(cluster, workers, {})
    num_bytes = _ELEMENT_BYTES * shape.num_parameters
    share = codec.payload_bytes(shape.num_parameters, torch.float32) / num_bytes
    coding, decoding = cluster.codec_moves.get(
        codec_registry.name_of(type(codec)), (codec.encoding_moves, codec.decoding_moves)
    )
    moves = (1 + 1 / workers) * coding + 2 * decoding + 8 + 2 / workers  # as `compression/pieces.py` says
    if cluster.cores is None and cluster.collective != "memory":
        costs = CollectiveCosts(cluster, "tree" if cluster.collective == "tree" else "ring")
        plain_s, coded_s = costs.all_reduce(num_bytes).time_s, 2 * costs.half(share * num_bytes).time_s
        coding_s = moves * num_bytes / cluster.core_bytes_per_s
        over = f"links of {number_text(8e-6 * cluster.bandwidth_bytes_per_s)} Mbit/s"
    else:
        at_once = min(workers, cluster.cores or workers)
        rate = min(cluster.core_bytes_per_s, cluster.bus_bytes_per_s / at_once) * at_once / workers
        plain_s = (_IN_MEMORY + 1 / workers) * num_bytes / rate
        coded_s, coding_s = share * plain_s, moves * num_bytes / rate
        over = "this machine's memory"
    return Balance(
        algorithm=algorithm,
        workers=workers,
        num_bytes=num_bytes,
        plain_s=plain_s,
        coded_s=coded_s,
        coding_s=coding_s,
        step_s=cluster.compute.mean_s,
        over=over,
    )


def weighed(
    given: Cluster | None,
    cores: int,
    shape: Shape | None,
    candidates: Sequence[Candidate],
    algorithms: Sequence[str] | None,
) -> tuple[list[Candidate], list[str], list[str]]:
    """Candidates with codecs that pay; sentences on why they do; sentences on why others are not tried.

    Args:
        given: the machines; None: this one, which is measured later: by the simulator's constants.
        cores: of this one.
        shape: of the program, where the machines are given.
        candidates: that there are.
        algorithms: specs that the user has named, which gain no candidate; None: none.
    """
    workers = max(one.workers for one in candidates)
    specs = [one for one in CODED if algorithms is None] or _coded(candidates)
    if workers < 2 or not specs or (given is None and algorithms is not None):
        return [], [], []
    cluster = given if given is not None else Cluster(workers=workers, cores=cores)
    in_seconds = shape is not None
    shape = shape or Shape(num_parameters=_LONG, batch_size=1)
    found: list[Candidate] = []
    why: list[str] = []
    why_not: list[str] = []
    for spec in specs:
        one = balance(spec, cluster, shape, workers)
        if one.pays:
            plain = spec.partition("(")[0]
            found += [Candidate(algorithm=spec, workers=c.workers) for c in candidates if c.algorithm == plain]
            why.append(words(one, in_seconds=in_seconds))
        elif algorithms is None:
            why_not.append(f"Not tried: {spec}: {words(one, in_seconds=in_seconds)}")
        else:
            why.append(f"{spec}: {words(one)}")
    return (found if algorithms is None else []), why, why_not


def _coded(candidates: Sequence[Candidate]) -> list[str]:
    """All-reduce with codecs that have a size of their own."""
    specs = dict.fromkeys(one.algorithm for one in candidates if one.algorithm.startswith("all-reduce("))
    return [one for one in specs if not isinstance(registry.build(one).codec, NoCodec | Power)]


def words(one: Balance, *, in_seconds: bool = True) -> str:
    """The inequality, with its figures; where a codec pays, what that means for methods that average seldom."""
    name = codec_registry.spec(registry.build(one.algorithm).codec)
    rule = "a codec pays where coding takes less than the bytes that it saves"
    if not in_seconds:
        times = one.coding_s / (one.plain_s - one.coded_s)
        return f"{rule}, and over {one.over} {name} takes {times:.1f} times as long as what it saves."
    figures = (
        f"with {workers_text(one.workers)} a mean of {number_text(1e-6 * one.num_bytes)} MB takes"
        f" {seconds_text(one.plain_s)} over {one.over}, in the bytes of {name} {seconds_text(one.coded_s)}, and coding"
        f" takes {seconds_text(one.coding_s)}: {seconds_text(one.coding_s)} {'<' if one.pays else '>'}"
        f" {seconds_text(one.plain_s)} - {seconds_text(one.coded_s)}"
    )
    if not one.pays:
        return f"{rule}; {figures}."
    said = f"Fewer bytes pay here: {rule}; {figures}."
    if one.plain_s <= one.step_s:
        return f"{said} A step computes for {seconds_text(one.step_s)}, behind which much of the mean may hide."
    return (
        f"{said} A step computes for {seconds_text(one.step_s)}: methods that average every few steps only, as diloco, or"
        " beside the steps, as da-sgd, save more, where they need no more samples."
    )
