"""Das et al.'s speed-ups of 2016, with fully connected layers in groups and without: a step's schedule on their machines.

python benchmarks/fidelity/das.py [--write]
"""

from __future__ import annotations

from dataclasses import dataclass

from page import show

from paceline.planner.balance import Layer, hybrid_bytes

CORI_BYTES_PER_S, AWS_BYTES_PER_S = 7e9, 1.25e9  # FDR at 56 Gbit/s, which the paper's balance point is for; 10 GbE


def _convolution(name: str, ifm: int, ofm: int, side: int, kernel: int = 3) -> Layer:
    return Layer(name=name, ifm=ifm, ofm=ofm, kernel=kernel**2, in_size=side**2, out_size=side**2)


VGG_A = [
    _convolution("conv1", 3, 64, 224),
    _convolution("conv2", 64, 128, 112),
    _convolution("conv3", 128, 256, 56),
    _convolution("conv4", 256, 256, 56),
    _convolution("conv5", 256, 512, 28),
    _convolution("conv6", 512, 512, 28),
    _convolution("conv7", 512, 512, 14),
    _convolution("conv8", 512, 512, 14),
    Layer(name="fc6", ifm=25088, ofm=4096),
    Layer(name="fc7", ifm=4096, ofm=4096),
    Layer(name="fc8", ifm=4096, ofm=1000),
]
OVERFEAT = [
    _convolution("conv1", 3, 96, 56, kernel=11),
    _convolution("conv2", 96, 256, 24, kernel=5),
    _convolution("conv3", 256, 512, 12),
    _convolution("conv4", 512, 1024, 12),
    _convolution("conv5", 1024, 1024, 12),
    Layer(name="fc6", ifm=36864, ofm=3072),
    Layer(name="fc7", ifm=3072, ofm=4096),
    Layer(name="fc8", ifm=4096, ofm=1000),
]
# The network for speech; widths and the rate of one node are assumed here, as the abstract has neither.
SPEECH = [
    Layer(name="in", ifm=429, ofm=2048),
    *(Layer(name=f"hidden{one}", ifm=2048, ofm=2048) for one in range(1, 7)),
    Layer(name="out", ifm=2048, ofm=9304),
]
SPEECH_PER_S, SPEECH_PUBLISHED = 4600, 6.5
SPEECH_BATCHES = (256, 512, 1024, 2048, 4096, 8192)


@dataclass(frozen=True)
class Row:
    """One published speed-up."""

    network: str
    layers: list[Layer]
    nodes: int
    batch: int
    points_per_s: float  # of one node
    bytes_per_s: float
    published: float  # speed-up


ROWS = [
    Row("VGG-A", VGG_A, 128, 512, 30, CORI_BYTES_PER_S, 90),
    Row("VGG-A", VGG_A, 64, 256, 30, CORI_BYTES_PER_S, 53),
    Row("OverFeat-FAST", OVERFEAT, 64, 256, 90, CORI_BYTES_PER_S, 42),
    Row("VGG-A", VGG_A, 16, 256, 28, AWS_BYTES_PER_S, 14.2),
    Row("OverFeat-FAST", OVERFEAT, 16, 256, 86, AWS_BYTES_PER_S, 11.9),
]


def groups_of(layer: Layer, row: Row, *, hybrid: bool) -> int:
    """G: as many groups as nodes for a convolution; for the others the divisor at which fewest bytes travel."""
    if not hybrid or layer.kernel > 1 or layer.in_size > 1:
        return row.nodes
    divisors = [one for one in range(1, row.nodes + 1) if row.nodes % one == 0]
    return min(divisors, key=lambda groups: (hybrid_bytes(layer, groups, row.nodes, row.batch, 0.0), -groups))


def step_s(row: Row, *, hybrid: bool) -> float:
    """Seconds between two steps, once they repeat.

    Forward through all layers, then backward, where a layer's weight gradient comes before its inputs' gradient, as in the
    paper. A gradient leaves at once over the node's one link, and its weights come back over it; the layer's next forward pass
    waits for them. What a group exchanges of a cut layer's inputs is waited for, half of it in each pass.
    """
    points = row.batch / row.nodes
    operations_per_s = row.points_per_s * sum(layer.operations(1) for layer in row.layers)
    third_s = [layer.operations(points) / operations_per_s / 3 for layer in row.layers]
    weights_s, inside_s = [], []
    for layer in row.layers:
        groups = groups_of(layer, row, hybrid=hybrid)
        bytes_ = hybrid_bytes(layer, groups, row.nodes, row.batch, 0.0)
        inside = 0.0 if groups == row.nodes else layer.activation_bytes(row.batch / groups)
        inside_s.append(inside / row.bytes_per_s / 2)
        weights_s.append((bytes_ - inside) / row.bytes_per_s)
    there_s, link_free_s, now_s, last_s = [0.0] * len(row.layers), 0.0, 0.0, 0.0
    for _ in range(12):
        last_s = now_s
        for at, third in enumerate(third_s):
            now_s = max(now_s, there_s[at], link_free_s if inside_s[at] else 0.0) + inside_s[at] + third
        for at in reversed(range(len(third_s))):
            now_s += third_s[at]
            link_free_s = max(link_free_s, now_s) + weights_s[at]
            there_s[at] = link_free_s
            if at:
                now_s += third_s[at]
                if inside_s[at]:
                    link_free_s = max(link_free_s, now_s) + inside_s[at]
                    now_s = link_free_s
    return now_s - last_s


def speed_up(row: Row, *, hybrid: bool) -> float:
    """Over one node."""
    return row.batch / row.points_per_s / step_s(row, hybrid=hybrid)


def first_paragraph() -> str:
    """What the schedule says of the published figures."""
    off = [speed_up(row, hybrid=True) / row.published - 1 for row in ROWS]
    pure = [speed_up(row, hybrid=False) for row in ROWS]
    above = sum(one > row.published for one, row in zip(pure, ROWS, strict=True))
    return (
        f"The schedule of hybrid parallelism is {min(off):+.0%} to {max(off):+.0%} off the published speed-ups, and is no"
        " measurement: it leaves out what makes nodes slower. Its control, pure data parallelism without groups, exceeds the"
        f" published figure in {above} of {len(ROWS)} rows. Ideal sharing would be the number of nodes. The seven-layer"
        f" network for speech was published with {SPEECH_PUBLISHED:g} on 16 nodes and without a batch, so it is given as a"
        " function of the batch, for assumed widths."
    )


def speech_lines() -> list[str]:
    """The seven-layer network's speed-ups by batch."""
    lines = [
        "## The network for speech, by batch",
        "",
        f"Speed-ups on 16 nodes; published: {SPEECH_PUBLISHED:g}, without its batch. Assumed: {SPEECH[0].ifm} inputs, seven"
        f" hidden layers of {SPEECH[0].ofm:,}, {SPEECH[-1].ofm:,} outputs, {SPEECH_PER_S:,} samples a second on one node, the"
        " other rows' faster network. The table tests no claim, as the batch can be chosen to fit.",
        "",
        "| batch | pure data | hybrid |",
        "|---|---|---|",
    ]
    for batch in SPEECH_BATCHES:
        row = Row("speech", SPEECH, 16, batch, SPEECH_PER_S, CORI_BYTES_PER_S, SPEECH_PUBLISHED)
        lines.append(f"| {batch:,} | {speed_up(row, hybrid=False):.1f} | {speed_up(row, hybrid=True):.1f} |")
    return [*lines, ""]


def page() -> list[str]:
    """The page's lines."""
    lines = [
        "# Speed-ups of hybrid parallelism",
        "",
        first_paragraph(),
        "",
        "Made by `python benchmarks/fidelity/das.py --write` in a second. Nothing here ran: it is a step's schedule, with the"
        " paper's own rate of one node, bandwidth and batch, without latency. Nothing is fitted to the speed-ups.",
        "",
        "| network | nodes | batch | pure data | hybrid | published | step, hybrid (ms) | published (ms) | missing (ms) |",
        "|---" * 9 + "|",
    ]
    for row in ROWS:
        one_s = row.batch / row.points_per_s
        data_s, hybrid_s = step_s(row, hybrid=False), step_s(row, hybrid=True)
        published_s = one_s / row.published
        speeds = f"{one_s / data_s:.1f} | {one_s / hybrid_s:.1f} | {row.published:g}"
        times = f"{hybrid_s * 1e3:.0f} | {published_s * 1e3:.0f} | {(published_s - hybrid_s) * 1e3:.0f}"
        lines.append(f"| {row.network} | {row.nodes} | {row.batch} | {speeds} | {times} |")
    lines += [
        "",
        "What is missing is in none of the equations: small batches that a node computes less efficiently than large ones,"
        " nodes that wait for the slowest, latencies, and communication that takes cores. A negative number is time that the"
        " schedule charges and the paper's machines did not take: activations in both directions share the link here, one"
        " after the other.",
        "",
        *speech_lines(),
        "## Groups",
        "",
    ]
    for row in ROWS:
        cut = {layer.name: groups_of(layer, row, hybrid=True) for layer in row.layers if layer.name.startswith("fc")}
        lines.append(f"- {row.network} on {row.nodes}: " + ", ".join(f"{name} in {g}" for name, g in cut.items()))
    lines += ["", "## Controls", ""]
    for row in ROWS:
        assert step_s(row, hybrid=True) <= step_s(row, hybrid=False), (row, "groups do not help")
    first = ROWS[0]
    pure = first.batch / first.points_per_s / step_s(first, hybrid=False)
    assert pure < first.published, "pure data parallelism reaches what was published with groups"
    lines.append(
        f"- VGG-A on 128 without groups comes to {pure:.1f}, below the published {first.published:g}: those need groups."
    )
    return lines


if __name__ == "__main__":
    show(page(), __file__)
