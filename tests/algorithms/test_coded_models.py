"""local-sgd, da-sgd and diloco through a codec: what travels are changes, which a codec may make coarse."""

import numpy as np
import pytest
import torch

import paceline as pl
from algorithms.delayed_reference import da_sgd, diloco, run_loop
from algorithms.test_coded_all_reduce import progress
from contracts.runs import run_task
from contracts.table import Row
from paceline.algorithms import means
from paceline.algorithms.merges import MeanOfModels, OfChanges
from paceline.compression.coded_mean import CodedMean
from paceline.simulator import Cluster

FINE = "qsgd(bits=8, bucket=8)"
CODED = [
    "local-sgd(period=4, codec=qsgd(bits=4))",
    "local-sgd(period=4, warmup_steps=10, codec=sign)",
    "da-sgd(period=4, delay=3, merge=corrected, codec=qsgd(bits=4))",
    "da-sgd(codec=dq(target_bits=4))",
    "da-sgd(codec=dq(target_error=0.001))",
    "diloco(period=8, outer=sgd(rate=1), fragments=2, delay=2, codec=power(rank=2, warmup_steps=0))",
    "diloco(period=8, outer=sgd(rate=1), codec=ternary)",
]


@pytest.mark.parametrize("merge", ["paper", "corrected", "cocod"])
@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16])
def test_means_of_changes_are_means_of_models(merge, kind):
    draws = torch.Generator().manual_seed(1)
    anchor, x, sent, other = (torch.randn(50, generator=draws, dtype=torch.float64).to(kind) for _ in range(4))
    wide = torch.float64 if kind == torch.float64 else torch.float32
    models = MeanOfModels(merge, 0.25)
    expected = models.merged(0, x, sent, (sent.to(wide) + other.to(wide)) / 2)
    changes = OfChanges(MeanOfModels(merge, 0.25), [anchor])
    own, theirs = (changes.outgoing(0, one) for one in (sent, other))
    assert own.dtype == wide
    torch.testing.assert_close(
        changes.merged(0, x, own, (own + theirs) / 2).to(wide), expected.to(wide), rtol=1e-5, atol=1e-6
    )
    assert torch.equal(changes.state()["anchors"][0], anchor.to(wide) + (own + theirs) / 2), "from which all go on"


def far(model, expected):
    return max((a - b).abs().max().item() for a, b in zip(model, expected, strict=True))


@pytest.mark.parametrize(("spec", "expected", "control"), [
    (
        f"da-sgd(period=4, delay=3, merge=corrected, codec={FINE})",
        lambda: da_sgd(3, 40, period=4, delay=3, local_weight=0.25, merge="corrected"),
        lambda: da_sgd(3, 40, period=4, delay=2, local_weight=0.25, merge="corrected"),
    ),
    (
        f"da-sgd(period=4, delay=2, compensate=false, codec={FINE})",
        lambda: da_sgd(3, 40, period=4, delay=2, local_weight=0.25),
        lambda: da_sgd(3, 40, period=4, delay=1, local_weight=0.25),
    ),
    (
        f"local-sgd(period=4, codec={FINE})",
        lambda: da_sgd(3, 40, period=4, delay=0, local_weight=0.0),
        lambda: da_sgd(3, 40, period=5, delay=0, local_weight=0.0),
    ),
    (
        f"diloco(period=6, fragments=2, delay=2, codec={FINE})",
        lambda: diloco(3, 40, period=6, fragments=2, delay=2, rate=0.7, momentum=0.9),
        lambda: diloco(3, 40, period=6, fragments=2, delay=1, rate=0.7, momentum=0.9),
    ),
])  # fmt: skip
@pytest.mark.parametrize("backend", ["simulator", "threads"])
def test_a_fine_codec_follows_the_rule(spec, expected, control, backend):
    """To its rounding, within which another delay or period would not be."""
    model = run_loop(spec, 3, 40, backend)[1]
    rounding = far(model, expected())
    assert 0 < rounding < 0.01
    assert far(control(), expected()) > 3 * rounding


@pytest.fixture(scope="module")
def plain():
    return progress("local-sgd(period=4)", collective="ring")


@pytest.mark.parametrize("spec", CODED)
def test_workers_learn_and_send_less(spec, plain):
    found, run = progress(spec, collective="ring")
    assert found > 0.7 * plain[0] > 1.0
    coded = np.concatenate(list(run.records.values()))
    assert 8 * coded["coded_bytes"].sum() / coded["coded_elements"].sum() < 16
    assert run.result["bits_per_element"] < 16


@pytest.mark.parametrize("spec", [
    "da-sgd(period=20, delay=11, merge=corrected, codec=sign)",
    "diloco(period=20, fragments=3, delay=5, codec=sign)",
    "diloco(period=20, delay=15, codec=power(rank=4, warmup_steps=0))",
])  # fmt: skip
def test_a_run_that_is_resumed_in_mid_flight_goes_on_bit_for_bit(spec, tmp_path):
    """31 rounds to an epoch: what left after the 20th is under way, and what it left behind is in the codec's memory."""
    settings = {"workers": 3, "backend": "processes", "batch_size": 16, "learning_rate": 0.1}
    row = Row(pl.parse(spec))
    _, straight = run_task(row, epochs=2, **settings)
    run_task(row, out=tmp_path, epochs=1, **settings)
    _, resumed = run_task(row, resume=tmp_path, out=tmp_path, epochs=2, **settings)
    assert torch.equal(resumed.x, straight.x)
    assert resumed.version == straight.version


def test_a_lone_worker_codes_nothing():
    x = [run_loop(f"local-sgd(period=3{codec})", 1, 20)[1] for codec in ("", ", codec=sign")]
    assert far(*x) == 0.0


def test_the_delay_that_is_chosen_is_of_coded_averages():
    """On a link on which a whole average takes some steps, one of 4 bits takes fewer."""
    delays = {}
    for codec in ("none", "qsgd(bits=4)"):
        spec = f"da-sgd(period=50, delay=auto, merge=corrected, codec={codec})"
        config = pl.TrainConfig(task="digits-mlp", algorithm=spec, workers=4, steps=60)
        cluster = Cluster(workers=4, compute_s=0.01, collective="ring", bandwidth_bytes_per_s=5e7)
        run = pl.simulate_task(config, cluster=cluster, timing_only=True, num_parameters=1_000_000)
        delays[codec] = run.result["delay"]
    assert 1 <= delays["qsgd(bits=4)"] < 0.5 * delays["none"]


@pytest.mark.parametrize(("rank", "is_refused"), [(2, False), (400, True)])
def test_a_rank_is_refused_of_the_whole_model_and_not_of_a_fragment(rank, is_refused):
    """Six tensors in six fragments: those of biases have no matrix, and travel as they are."""
    spec = f"diloco(period=6, fragments=6, codec=power(rank={rank}, warmup_steps=0))"
    config = pl.TrainConfig(task="digits-mlp", algorithm=spec, workers=2, steps=13)
    if is_refused:
        with pytest.raises(pl.UsageError, match=r"rank=400\) makes no part of this model smaller.* is 64"):
            pl.simulate_task(config, cluster=Cluster(workers=2, compute_s=0.01))
    else:
        run = pl.simulate_task(config, cluster=Cluster(workers=2, compute_s=0.01))
        assert run.result["outcome"] == "stopped"
        assert 0 < run.result["bits_per_element"] < 16


@pytest.mark.parametrize("name", ["local-sgd", "da-sgd", "diloco"])
def test_what_a_mean_of_all_cannot_carry_is_refused(name):
    with pytest.raises(pl.UsageError, match=rf"{name} cannot have codec=top-k") as refused:
        pl.parse(f"{name}(codec=top-k)")
    assert "\n" not in str(refused.value)


def mean_of_models(spec, monkeypatch, size=24):
    """Of three workers whose gradients depend on nothing but worker and step; and what the codecs remember, on average."""
    made, final = [], {}

    class Noted(CodedMean):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(means, "CodedMean", Noted)

    def loop():
        weights = torch.nn.ParameterList([torch.zeros(size, dtype=torch.float64)])
        optimizer = torch.optim.SGD(weights.parameters(), lr=0.1, momentum=0.5)
        with pl.attach(weights, optimizer) as worker:
            for step in range(27):
                draws = torch.Generator().manual_seed(100 * worker.worker_id + step)
                optimizer.zero_grad()
                (weights[0] @ torch.randn(size, generator=draws, dtype=torch.float64)).backward()
                optimizer.step()
        final[worker.worker_id] = weights[0].detach().clone()

    pl.simulate(loop, workers=3, algorithm=spec, cluster=Cluster(workers=3, compute_s=1.0))
    slots = [one.slots[0] for one in sorted(made, key=lambda one: one.worker_id)]
    if not slots:
        return final[0], 0.0
    kept = torch.stack([slot.memory for slot in slots]).mean(0) + torch.cat([slot.second for slot in slots])
    at = int(kept.nonzero()[0])
    return final[0], kept[at : at + size]


@pytest.mark.parametrize(("method", "share"), [
    ("local-sgd(period=4{})", 1.0),
    ("da-sgd(period=4, delay=2, local_weight=0.25{})", 0.75),
    ("da-sgd(period=4, delay=2, local_weight=0.25, merge=corrected{})", 0.75),
    ("da-sgd(period=4, delay=2, merge=cocod{})", 1.0),
    ("diloco(period=4, outer=sgd(rate=1){})", -1.0),
    ("diloco(period=4, delay=2, local_weight=0.5, outer=sgd(rate=1){})", -0.5),
])  # fmt: skip
@pytest.mark.parametrize("codec", ["sign(bucket=8)", "bf16(feedback=true)"])
def test_what_late_averages_lack_is_what_codecs_remember(method, share, codec, monkeypatch):
    """27 steps: the average that left after the 24th has been merged. `share` is that of the mean in what models become."""
    plain, _ = mean_of_models(method.format(""), monkeypatch)
    coded, kept = mean_of_models(method.format(f", codec={codec}"), monkeypatch)
    torch.testing.assert_close(coded + share * kept, plain, rtol=0, atol=1e-12)
    assert not torch.allclose(coded, plain, rtol=0, atol=1e-5)
