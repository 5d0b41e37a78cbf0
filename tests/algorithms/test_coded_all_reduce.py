"""All-reduce through a codec: runs of workers, simulated and as processes."""

from functools import cache

import numpy as np
import pytest
import torch

import paceline as pl
from contracts.linear_task import LINEAR
from contracts.runs import run_task
from contracts.table import Row
from paceline.compression.qsgd import QSGD
from paceline.loop.buckets import bucket_ranges
from paceline.optim.flat import FlatBinding
from paceline.run.config import TrainConfig
from paceline.run.train import prepared
from paceline.simulator import Cluster
from paceline.tasks.load import load_task

CODECS = ["qsgd(bits=4)", "dq(target_bits=4)", "dq(target_error=0.01)", "sign", "power(rank=4, warmup_steps=5)"]


def simulated(spec, workers=4, settings=(), **cluster):
    numbers = {"task": "digits-mlp", "epochs": 3, "batch_size": 16, "learning_rate": 0.3, **dict(settings)}
    config = pl.TrainConfig(algorithm=spec, workers=workers, **numbers)
    return pl.simulate_task(config, cluster=Cluster(workers=workers, compute_s=0.01, **cluster))


@pytest.fixture(scope="module")
def plain():
    return simulated("all-reduce", collective="ring")


@pytest.fixture(scope="module")
def plain_progress():
    return progress("all-reduce", collective="ring")


def progress(spec, **cluster):
    """How far the loss of a linear model falls; it is convex, so that rounding does not decide."""
    run = simulated(spec, settings={"task": LINEAR}, **cluster)
    assert run.result["outcome"] == "stopped"
    return run.result["initial_loss"] - run.result["test_loss"], run


@pytest.mark.parametrize(
    ("codec", "collective"),
    [
        *((one, "ring") for one in (*CODECS[:3], "power(rank=2, warmup_steps=5)")),
        ("qsgd(bits=4)", "memory"),
    ],
)
def test_simulated_workers_learn(codec, collective, plain_progress):
    found, run = progress(f"all-reduce(codec={codec})", collective=collective)
    assert found > 0.9 * plain_progress[0] > 1.0
    assert 0 < run.result["codec_share"] < 0.5


CURVATURES = torch.logspace(-0.7, 0, 512, dtype=torch.float64)  # 0.2 to 1


class Bowl(torch.nn.Module):
    """A quadratic loss, with a gradient in every element of one bucket."""

    def __init__(self):
        super().__init__()
        draws = torch.Generator().manual_seed(0)
        self.x = torch.nn.Parameter(torch.randn(len(CURVATURES), dtype=torch.float64, generator=draws))

    def forward(self):
        return (CURVATURES * self.x.square()).sum() / 2


@pytest.mark.parametrize(
    ("codec", "momentum", "rate", "converges"),
    [
        ("sign", 0.9, 0.5, False), ("sign", 0.9, 0.02, True), ("sign", 0.0, 0.5, True),
        ("none", 0.9, 0.5, True), ("qsgd(bits=4)", 0.9, 0.5, True),
    ],
)  # fmt: skip
def test_sign_takes_a_lower_rate_where_there_is_momentum(codec, momentum, rate, converges):
    """As its card says. Steps are in proportion to the distance, which shrinks or grows by orders of magnitude."""

    def loop():
        model = Bowl()
        optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum)
        with pl.attach(model, optimizer):
            first = model().item()
            for _ in range(100):
                optimizer.zero_grad()
                model().backward()
                optimizer.step()
        return model().item() / first

    run = pl.simulate(loop, workers=2, algorithm=f"all-reduce(codec={codec})")
    for share in run.returned.values():
        assert share < 0.1 if converges else share > 100


def test_bytes_on_the_wire_are_the_formulas_and_the_bits_are_over_time(plain):
    coded = simulated("all-reduce(codec=qsgd(bits=4))", collective="ring")
    rows = np.concatenate(list(coded.records.values()))
    elements = int(rows["coded_elements"][0])
    piece = -(-elements // 32) * 8
    payload = -(-QSGD(bits=4).payload_bytes(piece, torch.float32) // 8) * 8
    messages = 3 * (64 + 40 + payload) + 3 * (64 + 8 + payload)  # all-to-all and all-gather, with their frames
    first = coded.records[0][0]
    assert first["sent_bytes"] == pytest.approx(messages, abs=8 * 6 + 4 * 3 * 64 * 2)
    assert set(rows["coded_bytes"].tolist()) == {4 * (40 + payload)}
    assert coded.result["bits_per_element"] == pytest.approx(8 * 4 * (40 + payload) / elements)
    assert coded.result["bytes_per_step"] < 0.25 * plain.result["bytes_per_step"]  # 10,000 parameters: frames count
    assert plain.result["bits_per_element"] is None


def test_the_bits_of_dq_follow_the_gradient():
    run = simulated("all-reduce(codec=dq(target_bits=4.5))")
    rows = run.records[0]
    bits = 8 * rows["coded_bytes"] / rows["coded_elements"]
    assert len(set(bits.round(3))) > 1
    assert bits.mean() == pytest.approx(4.7, abs=0.4)


def test_a_target_error_takes_more_bits_as_the_gradient_grows():
    """In these steps it does: most elements are 0 at first."""
    rows = simulated("all-reduce(codec=dq(target_error=0.05))", collective="ring").records[0]
    bits = 8 * rows["coded_bytes"] / rows["coded_elements"]
    assert bits[-3:].mean() > bits[:3].mean() + 0.9
    assert bits.min() > 3
    assert bits.max() < 8


@pytest.mark.parametrize("codec", ["qsgd(bits=4)", "power(rank=4, warmup_steps=5)", "dq(target_error=1)"])
def test_time_alone_is_simulated_with_fewer_bytes(codec):
    times = {}
    for spec in ("all-reduce", f"all-reduce(codec={codec})"):
        config = pl.TrainConfig(task="digits-mlp", algorithm=spec, workers=4, steps=3)
        cluster = Cluster(workers=4, compute_s=0.01, collective="ring", bandwidth_bytes_per_s=1.25e7)
        run = pl.simulate_task(config, cluster=cluster, timing_only=True, num_parameters=1_000_000)
        times[spec] = run.result["wall_s"]
    plain, coded = times.values()
    assert coded > 0 if "power" in codec else coded < 0.3 * plain


@pytest.mark.parametrize("codec", [one for one in CODECS if one.startswith(("dq", "power"))])
def test_a_resumed_run_goes_on_bit_for_bit(codec, tmp_path):
    """As those with `qsgd` and `sign` do, which have rows in `contracts/table.py`."""
    row = Row(pl.parse(f"all-reduce(codec={codec})"))
    settings = {"workers": 3, "backend": "processes", "batch_size": 31, "learning_rate": 0.1}
    _, straight = run_task(row, epochs=2, **settings)
    run_task(row, out=tmp_path, epochs=1, **settings)
    _, resumed = run_task(row, resume=tmp_path, out=tmp_path, epochs=2, **settings)
    assert torch.equal(resumed.x, straight.x)
    assert resumed.version == straight.version


@cache
def trained(spec):
    """Three workers' parameters after 48 steps; the last round of each of the three epochs lacks a batch."""
    settings = {"backend": "threads", "workers": 3, "batch_size": 31, "epochs": 3, "learning_rate": 0.1}
    training = prepared(TrainConfig(task="digits-mlp", algorithm=spec, **settings), None, None)
    run = training.run()
    assert [len(own) for own in run.records.values()] == [48] * 3
    assert run.records[2]["samples"].tolist().count(0) == 3
    return [training.supervisor.parameters(worker).x for worker in range(3)]


@pytest.mark.parametrize("codec", CODECS)
def test_all_workers_are_equal_bit_for_bit_after_48_steps(codec):
    """With three buckets."""
    assert len(bucket_ranges(FlatBinding(load_task("digits-mlp").model().parameters()), 512)) == 3
    coded, plain = trained(f"all-reduce(bucket_bytes=512, codec={codec})"), trained("all-reduce")
    for each in (coded, plain):
        assert all(torch.equal(x, each[0]) for x in each)
    assert not torch.equal(coded[0], plain[0]), "nothing was rounded"
    assert torch.isfinite(coded[0]).all()


@pytest.mark.parametrize(("spec", "said"), [
    ("all-reduce(sharded=true, codec=qsgd)", r"sharded=true\) cannot have a codec.*Leave out one"),
    ("all-reduce(codec=top-k)", r"all-reduce cannot have codec=top-k.*use parameter-server\(codec=top-k\)"),
    ("parameter-server(codec=power)", r"parameter-server cannot have codec=power.*use all-reduce"),
    ("downpour(codec=power)", r"downpour cannot have codec=power.*use all-reduce"),
    ("d-psgd(codec=qsgd)", "gossip averages models"), ("ad-psgd(codec=sign)", "gossip averages models"),
])  # fmt: skip
def test_a_codec_on_a_carrier_that_cannot_is_one_sentence(spec, said):
    with pytest.raises(pl.UsageError, match=said) as refused:
        pl.parse(spec)
    assert "\n" not in str(refused.value)


def test_a_rank_above_the_matrices_ends_the_run_with_a_sentence():
    with pytest.raises(pl.UsageError, match=r"power\(rank=65\) makes no part of this model smaller"):
        simulated("all-reduce(codec=power(rank=65))")
