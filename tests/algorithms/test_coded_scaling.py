"""GradScaler under codecs: what they keep back is in the loss's own units, and a skipped step leaves it as it was.

The oracle is error feedback as the papers state it, in float64, which knows nothing of scales: it leaves out the rounds in
which a worker's gradient is infinite.
"""

import numpy as np
import pytest
import torch
from torch import nn

import paceline as pl
from paceline.compression.power import Factored

WORKERS, ROUNDS, ROWS, COLUMNS, RATE = 3, 14, 16, 24, 0.5
BAD_ROUNDS = {5: 1, 9: 0}  # and whose batch is infinite; the scale doubles after every second good step
LAST = WORKERS * ROUNDS - 1  # in the last round, the last worker has no batch


def batches(rounds=range(ROUNDS), bad=BAD_ROUNDS, swing=1.0):
    """Uneven batches by round and worker: rows of gradients, of one matrix and one vector, and a factor of the second's.

    Gradients of every third round are `swing` times as large.
    """
    found = []
    for number in rounds:
        generator = torch.Generator().manual_seed(number)
        for worker in range(WORKERS):
            size = 1 + (number + worker) % 3
            x = torch.randn(size, ROWS * COLUMNS + COLUMNS, generator=generator, dtype=torch.float64)
            if number * WORKERS + worker < LAST:
                found.append((x * (1.0 if number % 3 else swing), torch.inf if bad.get(number) == worker else 1.0))
    return found


class Linear(nn.Module):
    """Its gradient is the mean of its inputs."""

    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(torch.zeros(ROWS, COLUMNS, dtype=torch.float64))
        self.vector = nn.Parameter(torch.zeros(COLUMNS, dtype=torch.float64))

    def forward(self, x, factor):
        first, second = x.split([ROWS * COLUMNS, COLUMNS], dim=1)
        return (first @ self.matrix.view(-1)).mean() + factor * (second @ self.vector).mean()


def flat(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def run(algorithm, own=None, *, scaler=None, unscale=False, workers=WORKERS, passes=1, epochs=1):
    """How far each worker's parameters have moved, and its scale."""
    own = batches() if own is None else own
    settings = {"init_scale": 8.0, "growth_interval": 2} | (scaler or {})

    def loop():
        model = Linear()
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        scaler = torch.amp.GradScaler("cpu", **settings)
        with pl.attach(model, optimizer) as worker:
            loader = worker.batches(own)
            dealt = (batch for _ in range(epochs) for batch in loader)
            for number, (x, factor) in enumerate(dealt, start=1):
                scaler.scale(model(x, factor)).backward()
                if number % passes:
                    continue
                if unscale:
                    scaler.unscale_(optimizer)
                    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        return flat(model), scaler.get_scale()

    returned = pl.simulate(loop, workers=workers, algorithm=algorithm).returned
    for x, _ in returned.values():
        assert torch.equal(x, returned[0][0])
    return returned[0][0].numpy(), [returned[worker][1] for worker in range(workers)]


class Rounded:
    """bf16(feedback=true) and sign(bucket=8): all workers' messages are added up, and the sum is coded anew."""

    def __init__(self, code):
        self.code = code
        self.memories = [np.zeros(ROWS * COLUMNS + COLUMNS) for _ in range(WORKERS)]  # in units of the mean
        self.second = np.zeros(ROWS * COLUMNS + COLUMNS)

    def mean(self, gradients, shares):
        total = self.second.copy()
        for worker, (g, share) in enumerate(zip(gradients, shares, strict=True)):
            if share:
                given = g + self.memories[worker] / share
                sent = self.code(given)
                self.memories[worker] = share * (given - sent)
                total += share * sent
        decoded = self.code(total)
        self.second = total - decoded
        return decoded


class PowerSGD:
    """Rank r after so many steps that send all as it is; the vector is always sent so."""

    def __init__(self, rank, warmup):
        self.warmup, self.count = warmup, 0
        self.right = Factored(8, ROWS, COLUMNS).first_factor(rank).double().numpy().T
        self.memories = [np.zeros((ROWS, COLUMNS)) for _ in range(WORKERS)]  # in units of the mean

    def mean(self, gradients, shares):
        self.count += 1
        dense = sum(share * g for g, share in zip(gradients, shares, strict=True))
        if self.count <= self.warmup:
            return dense
        given = [
            share * g[: ROWS * COLUMNS].reshape(ROWS, COLUMNS) + memory if share else 0 * memory
            for g, share, memory in zip(gradients, shares, self.memories, strict=True)
        ]
        left, _ = np.linalg.qr(sum(given) @ self.right)
        self.right = sum(given).T @ left
        for worker, one in enumerate(given):
            if shares[worker]:
                self.memories[worker] = one - left @ (left.T @ one)
        dense[: ROWS * COLUMNS] = (left @ self.right.T).reshape(-1)
        return dense


def bf16(x):
    return torch.from_numpy(x).to(torch.bfloat16).double().numpy()


def sign(x):
    groups = x.astype(np.float32).reshape(-1, 8)
    return (np.where(groups >= 0, 1, -1) * np.abs(groups).mean(axis=1, keepdims=True)).astype(np.float64).reshape(-1)


CODECS = {
    "bf16(feedback=true)": lambda: Rounded(bf16),
    "sign(bucket=8)": lambda: Rounded(sign),
    "power(rank=2, warmup_steps=3)": lambda: PowerSGD(2, 3),
}


def oracle(codec, *, clips=False):
    """The same training, and the scale of workers that have a batch in every round."""
    method, x, scale, good = CODECS[codec](), np.zeros(ROWS * COLUMNS + COLUMNS), 8.0, 0
    dealt = [*batches(), None]
    for number in range(ROUNDS):
        if number in BAD_ROUNDS:
            scale, good = scale / 2, 0
            continue
        own = dealt[number * WORKERS : (number + 1) * WORKERS]
        sizes = [0 if one is None else len(one[0]) for one in own]
        shares = [size / sum(sizes) for size in sizes]
        update = method.mean([0 * x if one is None else one[0].numpy().mean(0) for one in own], shares)
        norm = np.linalg.norm(update)
        x -= RATE * update * (min(1.0, 0.5 / (norm + 1e-6)) if clips else 1.0)
        good += 1
        if good == 2:
            scale, good = scale * 2, 0
    return x, scale


@pytest.mark.parametrize("clips", [False, True], ids=["", "unscaled and clipped by the loop"])
@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20], ids=["a bucket per parameter", "one bucket"])
@pytest.mark.parametrize("codec", CODECS)
def test_parameters_are_those_of_a_method_that_knows_no_scales(codec, bucket_bytes, clips):
    """Parameters in buckets of their own: the infinity is in one of them, and both are rolled back."""
    expected, scale = oracle(codec, clips=clips)
    found, scales = run(f"all-reduce(codec={codec}, bucket_bytes={bucket_bytes})", unscale=clips)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
    assert scales[:-1] == [scale] * (WORKERS - 1)


@pytest.mark.parametrize("codec", ["sign", "power(rank=2, warmup_steps=3)", "bf16(feedback=true)", "dq(target_bits=3)"])
def test_a_skipped_round_leaves_all_as_if_there_had_been_none(codec):
    """What is rounded at random, too, draws what it would have drawn, and the bits follow the gradients that count."""
    algorithm = f"all-reduce(codec={codec}, bucket_bytes=1)"
    skipped, _ = run(algorithm, batches(swing=16.0))
    rounds = [number for number in range(ROUNDS) if number not in BAD_ROUNDS]
    left_out, _ = run(algorithm, batches(rounds, swing=16.0))
    np.testing.assert_array_equal(skipped, left_out)


@pytest.mark.parametrize("codec", ["none", "sign", "power(rank=2, warmup_steps=1)", "dq(target_bits=3)"])
def test_a_worker_without_a_batch_skips_with_the_others(codec):
    """It has coded its piece of the mean of the bucket that was finite, and the factors are all workers'."""
    algorithm = f"all-reduce(codec={codec}, bucket_bytes=1)"
    skipped, _ = run(algorithm, batches(range(3), {2: 0}, swing=16.0)[:-1], epochs=3)
    left_out, _ = run(algorithm, batches(range(2), swing=16.0), epochs=3)
    np.testing.assert_array_equal(skipped, left_out)


@pytest.mark.parametrize(
    "codec", ["qsgd(bits=4)", "ternary", "fp16", "dq(target_bits=4)", "sign", "bf16(feedback=true)"]
)
def test_an_infinity_of_one_worker_is_skipped_by_all(codec):
    even = batches()[: WORKERS * (ROUNDS - 1)]
    found, scales = run(f"all-reduce(codec={codec})", even, scaler={"growth_interval": 1000})
    assert np.isfinite(found).all()
    assert scales == [8.0 / 2 ** len(BAD_ROUNDS)] * WORKERS


@pytest.mark.parametrize("factor", [2.0, 1.5, 64.0])
@pytest.mark.parametrize("codec", [*CODECS, "none"])
def test_a_growing_scale_changes_nothing(codec, factor):
    own = batches(bad={})
    growing, _ = run(f"all-reduce(codec={codec})", own, scaler={"growth_factor": factor, "growth_interval": 1})
    fixed, _ = run(f"all-reduce(codec={codec})", own, scaler={"enabled": False})
    rounding = 0 if factor != 1.5 else 1e-6  # PyTorch divides by a float32 reciprocal, which of powers of two is exact
    np.testing.assert_allclose(growing, fixed, rtol=rounding, atol=rounding)


def test_workers_whose_scales_differ_send_gradients_of_one_unit():
    """They begin with different ones."""
    own = batches(range(4), bad={})[:-1]

    def loop():
        model = Linear()
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        with pl.attach(model, optimizer) as worker:
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0 * 2**worker.worker_id, growth_interval=2)
            for _ in range(3):
                for x, factor in worker.batches(own):
                    optimizer.zero_grad()
                    scaler.scale(model(x, factor)).backward()
                    scaler.step(optimizer)
                    scaler.update()
        return flat(model), scaler.get_scale()

    returned = pl.simulate(loop, workers=WORKERS, algorithm="all-reduce").returned
    assert returned[0][1] != returned[WORKERS - 1][1]
    expected = np.zeros(ROWS * COLUMNS + COLUMNS)
    for first in range(0, len(own), WORKERS):
        rows = torch.cat([x for x, _ in own[first : first + WORKERS]])
        expected -= 3 * RATE * rows.numpy().mean(0)
    for x, _ in returned.values():
        np.testing.assert_allclose(x.numpy(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("codec", ["sign", "top-k(fraction=0.1)", "bf16(feedback=true)"])
@pytest.mark.parametrize("method", ["parameter-server", "downpour"])
def test_servers_are_pushed_unscaled_gradients(method, codec):
    own = batches(bad={})
    settings = {"growth_factor": 2.0, "growth_interval": 1}
    found = {}
    for enabled in (True, False):
        found[enabled], _ = run(f"{method}(codec={codec})", own, scaler=settings | {"enabled": enabled}, workers=2)
    np.testing.assert_array_equal(found[True], found[False])
    assert np.abs(found[True]).max() > 0.1


def test_passes_that_only_add_up_are_coded_without_the_scale():
    """All are marked, so that the optimizer's step hands out what they add up to."""
    found = {}
    for enabled in (True, False):

        def loop(enabled=enabled):
            model = Linear()
            optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1, enabled=enabled)
            with pl.attach(model, optimizer) as worker:
                for x, factor in worker.batches(batches(bad={})):
                    optimizer.zero_grad()
                    with worker.accumulate():
                        scaler.scale(model(x, factor)).backward()
                    scaler.step(optimizer)
                    scaler.update()
            return flat(model)

        found[enabled] = pl.simulate(loop, workers=WORKERS, algorithm="all-reduce(codec=sign)").returned[0]
    assert torch.equal(found[True], found[False])


def test_the_first_pass_of_a_step_is_rolled_back_with_the_second():
    """Two passes a step, coded one by one: the first one's means are finite, and the step is skipped all the same."""
    rounds, bad = range(12), {5: 1}  # round 5 is the second pass of step 3
    skipped, _ = run("all-reduce(codec=sign)", batches(rounds, bad), passes=2)
    left_out, _ = run("all-reduce(codec=sign)", batches([n for n in rounds if n not in (4, 5)], {}), passes=2)
    np.testing.assert_array_equal(skipped, left_out)
