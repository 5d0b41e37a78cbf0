"""Coded means among workers that die, leave and lose connections, on a network whose every event a seed draws."""

import pytest
import torch

from compression.worlds import ports_of
from exact_codec import Exact
from paceline.compression.coded_mean import CodedMean
from paceline.compression.power import Power
from paceline.compression.qsgd import QSGD
from paceline.compression.sign import Sign
from transport.test_message_collectives import Network, collectives_over

STEPS, ROWS, COLUMNS = 3, 12, 10
SIZE = ROWS * COLUMNS + 3  # a matrix and what is no matrix
RANGES, SHAPES = ((0, ROWS * COLUMNS), (ROWS * COLUMNS, SIZE)), [(ROWS, COLUMNS), (3,)]


def given(worker, step):
    """Integers; the matrices of all workers have the same rows, so that their means have rank 1."""
    matrix = torch.outer(torch.arange(1.0, ROWS + 1) * (step + 1), torch.arange(1.0, COLUMNS + 1)) * 10**worker
    return torch.cat([matrix.view(-1), torch.full((3,), float(10**worker))])


def train(network, codec, weighs):
    """By worker: the members, the result and the number of each mean; and what the worker's codec remembers."""
    histories, memories = {one: [] for one in range(network.workers)}, {}

    def program(mailbox):
        me, collectives = mailbox.me, collectives_over(mailbox)
        coded = CodedMean(codec, ports_of(me, network.workers, collectives), RANGES, SHAPES)
        memories[me] = coded.slots
        for step in range(STEPS):
            buckets = [given(me, step) * (number + 1) for number in range(2)]
            means = [coded.start(number, x, weighs(me), said=2.0**me) for number, x in enumerate(buckets)]
            for one in means:
                one.advance()
            for one, x in zip(means, buckets, strict=True):
                totals = one.wait()
                assert tuple(totals.members) == collectives.members
                assert totals.number == sum(2**one for one in totals.members)
                histories[me].append((tuple(totals.members), totals.weight, x.tolist()))

    network.run(program)
    return histories


@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("faults", [0, 1, 2])
@pytest.mark.parametrize(
    ("codec", "error"),
    [
        (Exact(), 1e-6),
        (Exact(feedback=True), 1e-6),
        (Power(rank=1, warmup_steps=0), 1e-4),
        (QSGD(bits=8), 0.02),
        (Sign(), None),
    ],
    ids=str,
)
def test_a_mean_contains_exactly_its_members(codec, error, workers, faults):
    deaths = 0
    for number in range(25):
        network = Network(f"coded {codec} {workers} {faults} {number}", workers, faults)
        weighs = (lambda me: float(me + 1)) if number % 2 else (lambda me: float(me != 1))
        histories = train(network, codec, weighs)
        deaths += len(network.dead)
        longest = max(histories.values(), key=len)
        for one, history in histories.items():
            assert history == longest[: len(history)], number
            assert one in network.dead or len(history) == 2 * STEPS
        for place, (members, weight, x) in enumerate(longest):
            step, bucket = divmod(place, 2)
            assert weight == sum(map(weighs, members))
            total = sum(weighs(one) * (bucket + 1) * given(one, step) for one in members)
            expected = total / weight if weight else torch.zeros(SIZE)
            if error is not None:
                assert (torch.tensor(x) - expected).abs().max() <= error * expected.abs().max() + 1e-6, (number, place)
    assert deaths >= 6 * (faults > 0)
