"""Coded means among workers that die, leave and lose connections, on a network whose every event a seed draws."""

from dataclasses import dataclass

import pytest
import torch

from chosen import each_value
from compression.worlds import ports_of
from exact_codec import Exact
from paceline.compression.codec import Codec
from paceline.compression.coded_mean import CodedMean
from paceline.compression.pieces import piece_of
from paceline.compression.power import Power
from paceline.compression.qsgd import QSGD
from paceline.compression.sign import Sign
from transport.test_message_collectives import Network, collectives_over

STEPS, ROWS, COLUMNS = 3, 12, 10
SIZE = ROWS * COLUMNS + 3  # a matrix and what is no matrix
RANGES, SHAPES = ((0, ROWS * COLUMNS), (ROWS * COLUMNS, SIZE)), [(ROWS, COLUMNS), (3,)]


@dataclass(frozen=True, kw_only=True)
class Half(Codec):
    """Sends half of what there is, and keeps the other half back."""

    remembers = True

    def encode(self, gradient, memory, key=0):
        memory.add_(gradient).div_(2)
        return memory.clone()

    def decode(self, encoded, num_elements, dtype):
        return encoded

    def payload_bytes(self, num_elements, dtype):
        return num_elements * dtype.itemsize


def given(worker, step):
    """Integers; the matrices of all workers have the same rows, so that their means have rank 1."""
    matrix = torch.outer(torch.arange(1.0, ROWS + 1) * (step + 1), torch.arange(1.0, COLUMNS + 1)) * 10**worker
    return torch.cat([matrix.view(-1), torch.full((3,), float(10**worker))])


def train(network, codec, weighs):
    """By worker: the members, the weight and the result of each mean."""
    histories = {one: [] for one in range(network.workers)}

    def program(mailbox):
        me, collectives = mailbox.me, collectives_over(mailbox)
        coded = CodedMean(codec, ports_of(me, network.workers, collectives), RANGES, SHAPES)
        for step in range(STEPS):
            buckets = [given(me, step) * (number + 1) for number in range(2)]
            means = [coded.start(number, x, weighs(me), (2.0**me, 1.0, 0.0, 0.0)) for number, x in enumerate(buckets)]
            for one in means:
                one.advance()
            for one, x in zip(means, buckets, strict=True):
                totals = one.wait()
                assert tuple(totals.members) == collectives.members
                assert totals.numbers == [sum(2**one for one in totals.members), len(totals.members), 0, 0]
                histories[me].append((tuple(totals.members), totals.weight, x.tolist()))

    network.run(program)
    return histories


@pytest.mark.parametrize(("workers", "faults"), each_value([4, 2, 3], [1, 2, 0]))
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


@pytest.mark.parametrize(("workers", "faults"), each_value([4, 2, 3], [1, 2, 0]))
def test_what_members_have_kept_back_comes_later(workers, faults):
    """As one process computes it. If a worker dies between a mean's operations, nothing is kept back of the sum."""
    repeated = 0
    piece = piece_of(SIZE, workers)
    for number in range(60):
        network = Network(f"kept back {workers} {faults} {number}", workers, faults)
        longest = max(train(network, Half(), lambda me: float(me + 1)).values(), key=len)
        memories = [torch.zeros(2, workers, SIZE, dtype=torch.float64) for _ in range(2)]  # workers' own, and of sums
        for place, (members, weight, x) in enumerate(longest):
            step, bucket = divmod(place, 2)
            own, seconds = memories[bucket]
            for one in range(workers):
                own[one] = (own[one] + (bucket + 1) * given(one, step)) / 2
            mean = sum((one + 1) * own[one] for one in members) / weight
            is_owned = torch.isin(torch.arange(SIZE) // piece, torch.tensor(members))
            coded = torch.where(is_owned, (mean + seconds[0]) / 2, mean)
            found = torch.tensor(x, dtype=torch.float64)
            if torch.allclose(found, coded, rtol=1e-5):
                seconds[0] = torch.where(is_owned, coded, seconds[0])
            else:
                repeated += 1
                assert torch.allclose(found, mean, rtol=1e-5), (number, place)
    assert (repeated > 0) == (faults > 0)
