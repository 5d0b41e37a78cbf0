"""Means of several workers' vectors through a codec, over shared memory."""

import copy
import math
import warnings

import pytest
import torch

from compression.worlds import ON_ALL_REDUCE, gaussian, means, ports_of, run_workers
from paceline.compression.bf16 import BFloat16
from paceline.compression.coded_mean import CodedMean, without_memories
from paceline.compression.dq import DQ
from paceline.compression.power import Power
from paceline.compression.qsgd import QSGD
from paceline.compression.sign import Sign
from paceline.errors import NotFiniteWarning, UsageError

SIZE = 1501


def flows(num_workers, size=SIZE):
    return [lambda step, worker=worker: gaussian(1000 * worker + step, size) for worker in range(num_workers)]


@pytest.mark.parametrize("num_workers", [2, 5])
@pytest.mark.parametrize("codec", ON_ALL_REDUCE, ids=str)
def test_all_workers_have_the_same_bits_near_the_mean(codec, num_workers):
    results = means(codec, flows(num_workers), steps=4)
    for step in range(4):
        first, totals = results[0][0][step]
        sums = [sum(range(num_workers)), num_workers, 0, 0]
        assert totals == (num_workers, sums, tuple(range(num_workers)))
        assert all(torch.equal(found[step][0], first) for found, _ in results)
        exact = sum(one(step) for one in flows(num_workers)) / num_workers
        cosine = torch.cosine_similarity(first, exact, dim=0).item()
        assert cosine > 0.3


@pytest.mark.parametrize("codec", [QSGD(bits=8), QSGD(bits=3), Sign(), DQ()], ids=str)
def test_over_many_steps_the_mean_is_right(codec):
    """The same vectors again and again: rounding errors average out, or are made up for."""
    vectors = [gaussian(worker, 300) for worker in range(3)]
    weights = [3.0, 1.0, 2.0]
    results = means(codec, vectors, weights, steps=100)
    average = torch.stack([x for x, _ in results[0][0]]).double().mean(0)
    exact = sum(w * x.double() for w, x in zip(weights, vectors, strict=True)) / 6
    assert (
        average - exact
    ).norm() < 0.12 * exact.norm()  # of signs, what is kept after the last step is a hundredth of it
    assert (average - sum(vectors) / 3).norm() > 0.3 * exact.norm()  # means are weighted


@pytest.mark.parametrize("num_workers", [2, 3])
@pytest.mark.parametrize("codec", [QSGD(), Sign(), Power(rank=1, warmup_steps=0)], ids=str)
def test_a_worker_without_a_batch_adds_nothing(codec, num_workers):
    ranges, shapes = ((0, 600),), [(20, 30)]
    vectors = [gaussian(worker, 600) for worker in range(num_workers)]
    with_it = means(
        codec, [*vectors, torch.full((600,), 1e6)], [1.0] * num_workers + [0.0], ranges=ranges, shapes=shapes
    )
    for found, _ in with_it:
        assert found[0][0].abs().max() < 10
        assert found[0][1].weight == num_workers
    slot = with_it[-1][1].slots[0]
    assert getattr(slot, "memory", None) is None or not slot.memory.any()


def test_nobody_has_a_batch():
    for found, _ in means(QSGD(), [gaussian(1, 50)] * 2, [0.0, 0.0]):
        assert not found[0][0].any()


@pytest.mark.parametrize("codec", [QSGD(), Sign(), Power(rank=1, warmup_steps=0)], ids=str)
def test_one_worker_is_the_identity(codec):
    x = gaussian(1, 100)
    coded = CodedMean(codec, ports_of(0, 1, object()))
    y = x.clone()
    assert coded.start(0, y, 3.0, (2.0, 1.0, 0.0, 0.0)).wait() == (3.0, [2.0, 1.0, 0.0, 0.0], [0])
    assert torch.equal(x, y)
    assert coded.counts.coded_bytes == 0


@pytest.mark.parametrize("codec", [QSGD(), Sign(), Power(rank=1, warmup_steps=0)], ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_vector_that_is_not_finite_is_left_out_and_it_is_said(codec, bad):
    def spoilt(step):
        x = gaussian(step, 600)
        if step == 1:
            x[599] = bad
        return x

    with pytest.warns(NotFiniteWarning, match="worker 1 is not finite"):
        results = means(codec, [flows(2, 600)[0], spoilt], steps=3, ranges=((0, 600),), shapes=[(20, 30)])
    for found, _ in results:
        assert all(bool(x.isfinite().all()) for x, _ in found)
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(results[0][0], results[1][0], strict=True))


def test_what_is_coded_before_an_overflow_is_not_lost():
    """float32 memory plus a gradient may overflow in one piece after others have been coded."""
    codec = Sign()

    def program(worker, ports):
        coded = CodedMean(codec, ports)
        coded.start(0, gaussian(worker, 600), 1.0).wait()
        slot = coded.slots[0]
        before = slot.memory.clone()
        slot.memory[599] = 3e38
        x = gaussian(9, 600)
        x[599] = 3e38
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            coded.start(0, x, 1.0).wait()
        return before, slot.memory

    for before, after in run_workers(2, program, 600):
        assert torch.allclose(before[:599], after[:599], atol=1e-5)


def test_if_nobodys_is_finite_the_mean_says_so():
    with pytest.warns(NotFiniteWarning):
        results = means(QSGD(), [torch.full((40,), math.inf)] * 2)
    assert all(bool(found[0][0].isnan().all()) for found, _ in results)


def test_another_codec_is_one_sentence():
    def program(worker, ports):
        coded = CodedMean(QSGD(bits=4) if worker else QSGD(bits=4, norm="l2"), ports)
        coded.start(0, gaussian(1, 100), 1.0).wait()

    with pytest.raises(UsageError, match=r"with a codec other than worker \d's.*name the same one"):
        run_workers(2, program, 100)


@pytest.mark.parametrize("codec", [Sign(), DQ(target_bits=5), QSGD(), Power(rank=2, warmup_steps=0)], ids=str)
def test_a_state_goes_on_bit_for_bit(codec):
    ranges, shapes = ((0, 1200), (1216, 1501)), [(30, 40), (285,)]

    def run(steps, states=None):
        def program(worker, ports):
            coded, found = CodedMean(codec, ports, ranges, shapes), []
            if states is not None:
                coded.load(states[worker])
            for step in steps:
                x = gaussian(100 * worker + step, SIZE) * (1 + step)
                x[1200:1216] = 0
                coded.start(0, x, 1.0).wait()
                found.append(x)
            return found, coded.state()

        return run_workers(3, program, SIZE)

    straight = run(range(8))
    states = [state for _, state in run(range(5))]
    for (whole, _), (part, _) in zip(straight, run(range(5, 8), states), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(whole[5:], part, strict=True))


@pytest.mark.parametrize(
    "codec", [Sign(), BFloat16(feedback=True), DQ(target_bits=3), Power(rank=2, warmup_steps=1)], ids=str
)
@pytest.mark.parametrize("whole", [True, False])
def test_another_workers_state_is_taken_over_without_its_memories(codec, whole):
    """As by a newcomer, or by a dead worker's successor, which finds a survivor's whole state in a checkpoint."""

    def program(worker, ports, states=None):
        coded, found = CodedMean(codec, ports, ((0, 600),), [(20, 30)]), []
        if states is not None:
            state = states[0] if worker == 0 or whole else without_memories(states[0])
            coded.load(copy.deepcopy(state))
        for step in range(2):
            x = gaussian(7 * worker + step, 600)
            coded.start(0, x, 1.0).wait()
            found.append(x)
        kept = coded.slots[0].memory
        return coded.state(), found, kept

    states = [state for state, *_ in run_workers(2, program, 600)]
    (first, own, _), (_, others, kept) = run_workers(2, lambda *of: program(*of, states), 600)
    assert all(map(torch.equal, own, others))
    assert first["slots"][0]["count"] == 4
    _, _, fresh = run_workers(2, program, 600)[1]
    if isinstance(codec, Sign | BFloat16):
        assert torch.equal(kept, fresh), "as of a worker that begins"


def test_another_codecs_state_is_left_out_and_it_is_said():
    coded = CodedMean(Sign(), ports_of(0, 2, object()))
    with pytest.warns(UserWarning, match="with another codec"):
        coded.load({"codec": 1, "slots": {}, "sizes": {}, "tuner": {}})


@pytest.mark.parametrize("codec", [Sign(), Power(rank=2, warmup_steps=0)], ids=str)
@pytest.mark.parametrize(("workers", "size"), [(3, 600), (2, 800), (1, 600)])
def test_what_does_not_fit_is_left_out_and_it_is_said_once(codec, workers, size):
    """A checkpoint of two workers and 600 elements; `Power` remembers the same whoever else there is."""

    def program(worker, ports, kept=None, n=600):
        coded, found = CodedMean(codec, ports, ((0, n),), [(20, n // 20)]), []
        coded.load(kept and {**kept, "worker": worker})
        for number in (0, 1):
            found.append(gaussian(worker, n))
            coded.start(number, found[-1], 1.0).wait()
        return coded.state(), found

    (kept, _), *_ = run_workers(2, program, 600)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        _, found = run_workers(workers, lambda worker, ports: program(worker, ports, kept, size), size)[0]
    fits = isinstance(codec, Power) and workers > 1 and size == 600
    assert len(said) == (0 if fits else workers)
    assert all("another number of workers, or with other buckets" in str(one.message) for one in said)
    if workers == 1:
        return  # nothing is coded, and so nothing remembered
    _, anew = run_workers(workers, lambda worker, ports: program(worker, ports, None, size), size)[0]
    assert all(torch.equal(a, b) for a, b in zip(found, anew, strict=True)) != fits


def test_what_lies_between_parameters_stays_zero():
    def vector(step):
        x = gaussian(step, 100)
        x[:16] = 0
        return x

    for found, coded in means(Sign(), [vector, vector], steps=5, ranges=((16, 100),)):
        assert all(not x[:16].any() for x, _ in found)
        assert not coded.slots[0].memory[:16].any()


@pytest.mark.parametrize("num_workers", [2, 4])
def test_bytes_are_those_of_the_formula(num_workers):
    size = 100_000
    results = means(QSGD(bits=4), [gaussian(w, size) for w in range(num_workers)])
    piece = -(-size // (8 * num_workers)) * 8
    payload = 4 * -(-piece // 512) + piece // 2
    for _, coded in results:
        assert coded.counts.coded_elements == size
        assert coded.counts.coded_bytes == num_workers * (40 + -(-payload // 8) * 8)
        assert 8 * coded.counts.coded_bytes / size < 4.1


# PowerSGD

RANGES, SHAPES = ((16, 1216), (1216, 1246), (1248, 2448)), [(30, 40), (30,), (40, 30)]


def low_rank(rank, seed):
    x = torch.zeros(2464)
    for (begin, end), shape in zip(RANGES, SHAPES, strict=True):
        if len(shape) == 1:
            x[begin:end] = gaussian(seed, 30)
        else:
            left, right = (
                gaussian(seed, shape[0] * rank).view(-1, rank),
                gaussian(seed + 1, shape[1] * rank).view(rank, -1),
            )
            x[begin:end] = (left @ right).view(-1)
    return x


def test_power_gets_what_is_of_its_rank_exactly():
    x = low_rank(2, 5)
    for found, _ in means(Power(rank=2, warmup_steps=0), [x, x, x], [1.0, 2.0, 4.0], ranges=RANGES, shapes=SHAPES):
        assert torch.allclose(found[0][0], x, atol=1e-4)


def test_power_keeps_what_it_lacks():
    """The mean of what was sent and what is kept, weighted alike, is the mean of what came in."""
    vectors = [gaussian(worker, 2464) for worker in range(3)]
    for one in vectors:
        one[:16] = one[1246:1248] = one[2448:] = 0
    results = means(Power(rank=2, warmup_steps=0), vectors, [1.0, 1.0, 1.0], steps=6, ranges=RANGES, shapes=SHAPES)
    sent = sum(x.double() for x, _ in results[0][0])
    kept = sum(coded.slots[0].memory.double() for _, coded in results) / 3
    came = 6 * sum(x.double() for x in vectors) / 3
    assert torch.allclose(sent + kept, came, atol=1e-4)
    assert kept.norm() > 0.1 * came.norm() / 6
    assert all(torch.equal(a[0], b[0]) for a, b in zip(results[0][0], results[1][0], strict=True))
    dense = slice(*RANGES[1])
    assert torch.allclose(results[0][0][0][0][dense], came[dense].float() / 6, atol=1e-6)  # vectors travel as they are


def test_in_the_warm_up_all_travels_as_it_is():
    results = means(Power(rank=2, warmup_steps=2), flows(2, 2464), steps=3, ranges=RANGES, shapes=SHAPES)
    for step in range(3):
        exact = sum(one(step) for one in flows(2, 2464)) / 2
        found = results[0][0][step][0]
        assert torch.allclose(found, exact, atol=1e-5) == (step < 2)


@pytest.mark.parametrize("codec", [Sign(), Power(rank=2, warmup_steps=0)], ids=str)
def test_what_is_kept_counts_as_much_when_weights_change(codec):
    """Sent, and kept by its worker's share, is what came in, though a worker may be absent or have half a batch."""
    weights = [[1.0, 1.0, 1.0], [2.0, 1.0, 0.0], [0.0, 1.0, 0.0], [4.0, 0.0, 1.0], [1.0, 1.0, 1.0]]

    def program(worker, ports):
        coded, sent, came = CodedMean(codec, ports, RANGES, SHAPES), 0.0, 0.0
        for step, of_all in enumerate(weights):
            x = low_rank(3, 10 * worker + step) if of_all[worker] else torch.zeros(2464)
            came = came + x.double() * of_all[worker] / sum(of_all)
            coded.start(0, x, of_all[worker], total=sum(of_all)).wait()
            sent = sent + x.double()
        slot = coded.slots[0]
        second = torch.zeros(2464)
        if isinstance(codec, Sign):
            part = slot.second[: 2464 - worker * slot.piece]
            second[worker * slot.piece :][: len(part)] = part
        kept = slot.share * slot.memory[:2464].double() + second.double()
        return sent, came, kept

    results = run_workers(3, program, 2464)
    came, kept = (sum(one[at] for one in results) for at in (1, 2))
    inside = torch.cat([torch.arange(*one) for one in RANGES])
    difference = (results[0][0] + kept - came)[inside]
    assert difference.abs().max() < 1e-4
    assert kept[inside].abs().max() > 0.1


def test_power_of_zeros_is_zero():
    for found, _ in means(Power(rank=2, warmup_steps=0), [torch.zeros(2464)] * 2, ranges=RANGES, shapes=SHAPES):
        assert not found[0][0].any()


@pytest.mark.parametrize("rank", [16, 31])
def test_a_rank_above_the_matrices_is_one_sentence(rank):
    with pytest.raises(UsageError, match=rf"power\(rank={rank}\) makes no part of this model smaller.* 30"):
        means(Power(rank=rank, warmup_steps=0), [gaussian(1, 2464)] * 2, ranges=RANGES, shapes=SHAPES)


def test_power_sends_the_factors_bytes():
    for _, coded in means(Power(rank=2, warmup_steps=0), [low_rank(2, 1)] * 2, ranges=RANGES, shapes=SHAPES):
        dense = 2464 - 2400
        assert coded.counts.coded_bytes == 4 * (2 * 2 * 70 + dense + 6)
