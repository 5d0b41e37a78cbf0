"""Which layers to cut over how many groups: the balance equations plus computing at local shapes, latency, and borders.

For each number of groups and each pairing, a dynamic programme over the chain of layers finds the cheapest combination:
each layer whole, cut by outputs or cut by inputs, plus the cost of passing from one to the next. It is exact for chains,
and takes as many steps as there are layers.

Bytes are those of one worker and one step, as ring algorithms send them. Exchanges inside a group are waited for;
gradients overlap with the computation of earlier layers, as in `balance`.

Reference: Das et al., 2016, arXiv:1602.06709, section 3; Jia et al., "Exploring Hidden Dimensions in Parallelizing
    Convolutional Neural Networks", ICML 2018, arXiv:1802.04924, whose elimination this is on a chain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from paceline.planner.balance import ELEMENT_BYTES, Layer

_PAIRINGS = ("gather", "column-row")


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One layer of the chain.

    Args:
        follows: whether only element-wise modules lie between it and the previous layer, which can be cut, too.
    """

    layer: Layer
    can_cut: bool = False
    follows: bool = False


@dataclass(frozen=True, kw_only=True)
class CutChoice:
    """How one layer is trained."""

    name: str
    how: str  # "whole", "by outputs" or "by inputs"
    sent_bytes: float
    exposed_s: float  # communication time that no computation hides
    compute_s: float  # forward, backward and weight gradient at the local shape

    @property
    def time_s(self) -> float:
        return self.exposed_s + self.compute_s


@dataclass(frozen=True, kw_only=True)
class LayoutChoice:
    """One way to train the chain."""

    groups: int  # G; if it equals the number of workers, nothing is cut
    pairing: str  # between two cut layers
    layers: tuple[CutChoice, ...]

    @property
    def cut(self) -> tuple[str, ...]:
        return tuple(one.name for one in self.layers if one.how != "whole")

    @property
    def sent_bytes(self) -> float:
        return sum(one.sent_bytes for one in self.layers)

    @property
    def exposed_s(self) -> float:
        return sum(one.exposed_s for one in self.layers)

    @property
    def time_s(self) -> float:
        return sum(one.time_s for one in self.layers)


def choose_layouts(
    candidates: Sequence[Candidate],  # the layers, in the order of the forward pass
    *,
    nodes: int,  # N workers
    batch: int,  # points of all of them together in one step
    latency_s: float,  # of a message
    bytes_per_s: float,  # that a worker sends
    # Seconds of a layer, or of a part of one, for a number of points: forward, backward, weight gradient.
    compute_s: Callable[[Layer, float], float],
    pairings: Sequence[str] = _PAIRINGS,  # to choose from
) -> list[LayoutChoice]:
    """The fastest ways to train, the best first; each has the best cut layers for its groups and pairing.

    >>> chain = [Candidate(layer=Layer(name="a", ifm=4096, ofm=4096), can_cut=True)]
    >>> best, second = choose_layouts(chain, nodes=2, batch=8, latency_s=0.0, bytes_per_s=1e9, compute_s=lambda *_: 0.0)[:2]
    >>> best.groups, best.cut, second.groups
    (1, ('a',), 2)
    """
    found: dict[tuple[int, tuple[str, ...]], LayoutChoice] = {}
    for groups in (one for one in range(1, nodes + 1) if nodes % one == 0):
        for pairing in pairings if groups < nodes else pairings[:1]:
            chain = _Chain(nodes, groups, pairing, batch, latency_s, bytes_per_s, compute_s)
            layers = chain.best(candidates)
            if layers is not None:
                choice = LayoutChoice(groups=groups, pairing=pairing, layers=layers)
                found.setdefault((groups, tuple(one.how for one in layers)), choice)  # equal without two cut in a row
    return sorted(found.values(), key=lambda one: (one.time_s, len(one.cut)))


@dataclass(frozen=True)
class _Chain:
    """One number of groups and one pairing."""

    nodes: int
    groups: int
    pairing: str
    batch: int
    latency_s: float
    bytes_per_s: float
    compute_s: Callable[[Layer, float], float]

    def best(self, candidates: Sequence[Candidate]) -> tuple[CutChoice, ...] | None:
        """The fastest way that cuts a layer, unless groups have one worker; None if no way does."""
        # By what a layer leaves: `whole` rows; a `part` of the features; `closed`: whole rows of a layer that was cut, and
        # would have left a part if the next one of the same chain were cut, too.
        # And whether any layer was cut.
        ways: dict[tuple[str, bool], tuple[float, tuple[CutChoice, ...]]] = {("whole", False): (0.0, ())}
        before_s = 0.0
        for candidate in candidates:
            after: dict[tuple[str, bool], tuple[float, tuple[CutChoice, ...]]] = {}
            for (state, has_cut), (time_s, path) in ways.items():
                for left, choice in self._steps(candidate, state, before_s):
                    new, key = (time_s + choice.time_s, (*path, choice)), (left, has_cut or choice.how != "whole")
                    if key not in after or new[0] < after[key][0]:
                        after[key] = new
            ways = after
            before_s += self.compute_s(candidate.layer, self.batch / self.nodes)
        cuts = self.groups < self.nodes
        ends = [way for (state, has_cut), way in ways.items() if state != "part" and has_cut == cuts]
        return min(ends, key=lambda way: way[0])[1] if ends else None

    def _steps(self, candidate: Candidate, state: str, before_s: float) -> list[tuple[str, CutChoice]]:
        layer, parts, rows = candidate.layer, self.nodes // self.groups, self.batch / self.nodes
        steps = []
        if state != "part":
            steps.append(("whole", self._choice(layer, "whole", 1, self.nodes, [], before_s)))
        may = candidate.can_cut and parts > 1 and not (state == "closed" and candidate.follows)
        if not may or (state == "part" and not candidate.follows):
            return steps
        inputs, outputs = rows * layer.ifm, rows * layer.ofm  # a gather sends m - 1 times as many elements
        if state == "part" and self.pairing == "column-row":
            if layer.ifm % parts == 0:
                steps.append(
                    ("whole", self._choice(layer, "by inputs", parts, self.groups, [outputs, outputs], before_s))
                )
            return steps
        if layer.ofm % parts == 0:
            gathers = [inputs, inputs]
            steps.append(("part", self._choice(layer, "by outputs", parts, self.groups, gathers, before_s)))
            gathers = [*gathers, outputs / parts, outputs / parts]
            steps.append(("closed", self._choice(layer, "by outputs", parts, self.groups, gathers, before_s)))
        return steps

    def _choice(
        self, layer: Layer, how: str, parts: int, holders: int, gathers: Sequence[float], before_s: float
    ) -> CutChoice:
        """One layer in `parts` parts, each on `holders` workers; `gathers`: elements of each exchange in a group."""
        gradient = 2 * (holders - 1) / holders * layer.weights / parts * ELEMENT_BYTES
        gradient_s = gradient / self.bytes_per_s + 2 * (holders - 1) * self.latency_s
        inside = sum(gathers) * (parts - 1) * ELEMENT_BYTES
        inside_s = inside / self.bytes_per_s + len(gathers) * (parts - 1) * self.latency_s
        cut = {"whole": {}, "by outputs": {"ofm": layer.ofm // parts}, "by inputs": {"ifm": layer.ifm // parts}}[how]
        return CutChoice(
            name=layer.name,
            how=how,
            sent_bytes=gradient + inside,
            exposed_s=max(0.0, gradient_s - before_s) + inside_s,
            compute_s=self.compute_s(replace(layer, **cut), self.batch / self.nodes * parts),
        )
