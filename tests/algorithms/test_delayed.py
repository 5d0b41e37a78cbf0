"""local-sgd, da-sgd and diloco are their rules, to 1e-12 in float64; what is late is as late as said; bad input is refused."""

import itertools
import re
import shutil

import pytest
import torch
from torch import nn

import paceline as pl
from algorithms.delayed_reference import Loop, da_sgd, diloco, make_batches, make_model, make_optimizer, run_loop, step
from contracts.linear_task import LINEAR
from paceline.algorithms.cuts import cut
from paceline.algorithms.fragments import Schedule
from paceline.errors import AlgorithmWarning
from paceline.records import checkpoint_contents as checkpoint
from paceline.records import checkpoint_files
from rewritten import rewrite

pytestmark = pytest.mark.filterwarnings("ignore:Merges drop:paceline.errors.AlgorithmWarning")


def check(model, expected):
    for one, other in zip(model, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def differ(model, other):
    return any((a - b).abs().max() > 1e-6 for a, b in zip(model, other, strict=True))


# (workers, batches): the last round lacks a worker's batch or two
SIZES = [(2, 25), (5, 63)]
DA_SGD = [
    {"period": 1, "delay": 0, "local_weight": 0.0},
    {"period": 1, "delay": 1, "local_weight": 0.5},
    {"period": 4, "delay": 1, "local_weight": 0.25},
    {"period": 4, "delay": 3, "local_weight": 0.25},
    {"period": 4, "delay": 4, "local_weight": 0.25, "merge": "corrected"},
    {"period": 3, "delay": 0, "local_weight": 0.5, "merge": "corrected"},
    {"period": 3, "delay": 3, "local_weight": 0.0, "merge": "cocod"},
]
OUTER = [{"rate": 1.0}, {"rate": 0.7, "momentum": 0.9}]
DILOCO = [
    {"period": 4},
    {"period": 4, "delay": 2},
    {"period": 4, "delay": 3, "local_weight": 0.5},
    {"period": 6, "fragments": 2},
    {"period": 7, "fragments": 2, "delay": 3, "local_weight": 0.25},
    {"period": 9, "fragments": 4, "delay": 2},
]


def spec_of(settings):
    outer = pl.Nesterov(rate=settings["rate"], momentum=settings["momentum"]) if "momentum" in settings else None
    rest = {name: value for name, value in settings.items() if name not in ("rate", "momentum")}
    return pl.DiLoCo(outer=outer or pl.OuterSGD(rate=settings["rate"]), **rest)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("settings", DA_SGD, ids=str)
def test_da_sgd_is_its_rule(settings, size):
    _, model = run_loop(pl.DaSGD(**settings, compensate=False), *size)
    check(model, da_sgd(*size, **settings))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("outer", OUTER, ids=["sgd", "nesterov"])
@pytest.mark.parametrize("settings", DILOCO, ids=str)
def test_diloco_is_its_rule(settings, outer, size):
    _, model = run_loop(spec_of({**settings, **outer}), *size)
    check(model, diloco(*size, **settings, **outer))


@pytest.mark.parametrize("backend", ["threads"])
def test_real_workers_follow_the_rules_too(backend):
    for settings in DA_SGD[2:5]:
        _, model = run_loop(pl.DaSGD(**settings, compensate=False), 3, 40, backend)
        check(model, da_sgd(3, 40, **settings))
    for settings in DILOCO[-2:]:
        _, model = run_loop(spec_of({**settings, **OUTER[1]}), 3, 40, backend)
        check(model, diloco(3, 40, **settings, **OUTER[1]))


def test_the_references_tell_the_rules_apart():
    """Controls: a later merge, another weight or another merge would show."""
    results = [da_sgd(3, 40, **settings) for settings in DA_SGD]
    results += [diloco(3, 40, **settings, **outer) for settings in DILOCO for outer in OUTER]
    pairs = [(a, b) for i, a in enumerate(results) for b in results[:i]]
    assert sum(not differ(a, b) for a, b in pairs) == 0


@pytest.mark.parametrize("size", SIZES)
def test_identities(size):
    """Of the papers: without a delay they are model averaging, local SGD and DiLoCo."""
    averaging = run_loop("local-sgd(period=1)", *size)[1]
    check(run_loop("da-sgd(period=1, delay=0, local_weight=0)", *size)[1], averaging)
    local = run_loop("local-sgd(period=4)", *size)[1]
    check(run_loop("da-sgd(period=4, delay=0, local_weight=0)", *size)[1], local)
    check(run_loop("diloco(period=4, outer=sgd(rate=1))", *size)[1], local)
    late = run_loop("da-sgd(period=4, delay=2, local_weight=0.25, compensate=false)", *size)[1]
    check(run_loop("diloco(period=4, outer=sgd(rate=1), delay=2, local_weight=0.25)", *size)[1], late)
    assert differ(local, averaging)
    assert differ(late, local)


@pytest.mark.parametrize("algorithm", ["diloco(period=4, outer=sgd(rate=1))", "da-sgd", "da-sgd(delay=4, period=4)"])
def test_a_lone_worker_trains_plainly(algorithm):
    plain = make_model()
    optimizer = make_optimizer(plain)
    for batch in make_batches(30):
        step(plain, optimizer, batch)
    for backend in ("simulator", "threads"):
        check(run_loop(algorithm, 1, 30, backend)[1], [p.detach() for p in plain.parameters()])


def test_a_lone_worker_makes_outer_steps():
    settings = {"period": 4, "rate": 0.7, "momentum": 0.9, "fragments": 2, "delay": 1}
    check(run_loop(spec_of(settings), 1, 30)[1], diloco(1, 30, **settings))


class Constant(nn.Module):
    """A model whose gradient is -1, wherever it is."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, x):
        return -(self.w * x).sum()


def progress(algorithm, steps, workers=2):
    """How far the workers' mean has come in so many steps of length 1 of each."""
    final = []

    def loop():
        model = Constant()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with pl.attach(model, optimizer) as worker:
            for x in worker.batches([torch.ones(1, dtype=torch.float64)] * (workers * steps)):
                optimizer.zero_grad()
                model(x).backward()
                optimizer.step()
        final.append(model.w.item())

    run = pl.simulate(loop, workers=workers, algorithm=algorithm)
    return final[0], run.result


@pytest.mark.parametrize(
    ("algorithm", "factor"),
    [
        ("da-sgd(compensate=false)", 0.8125),
        ("da-sgd(delay=3, compensate=false)", 0.4375),
        ("da-sgd(delay=4, compensate=false)", 0.25),
        ("da-sgd(period=8, delay=4, local_weight=0.5, compensate=false)", 0.75),
        ("da-sgd(delay=4, merge=corrected)", 1.0),
        ("da-sgd(delay=4, merge=cocod)", 1.0),
        ("diloco(period=8, delay=4, outer=sgd(rate=1))", 0.5),
        ("diloco(period=8, fragments=1, delay=2, local_weight=0.5, outer=sgd(rate=1))", 0.875),
    ],
)
def test_a_constant_gradient_advances_at_the_progress_factor(algorithm, factor):
    """From one merge to another one: what is under way at the end and before the first merge is not in it."""
    period, delay = pl.parse(algorithm).period, pl.parse(algorithm).delay
    (early, _), (late, result) = (progress(algorithm, delay + rounds * period) for rounds in (3, 13))
    assert (late - early) / (10 * period) == pytest.approx(factor, abs=1e-12)
    assert result["progress_factor"] == pytest.approx(factor)
    assert result["delay"] == delay


@pytest.mark.parametrize("delay", [1, 3])
def test_a_compensated_rate_makes_up_for_what_merges_drop(delay):
    (early, _), (late, result) = (progress(f"da-sgd(delay={delay})", delay + rounds * 4) for rounds in (3, 13))
    assert (late - early) / 40 == pytest.approx(1.0, abs=1e-12)
    assert result["rate_factor"] == pytest.approx(1 / result["progress_factor"])
    assert result["progress_factor"] < 1


def test_half_types_are_averaged_in_float32():
    """Workers on equal data have equal models; averaged in their own type, they would drift."""

    def loop():
        model = make_model().bfloat16()
        optimizer = make_optimizer(model)
        with pl.attach(model, optimizer) as worker:
            for x, y in worker.batches(
                [make_batches(3)[index // worker.num_workers % 3] for index in range(workers * 24)]
            ):
                step(model, optimizer, (x.bfloat16(), y))
        final.append([p.detach().clone() for p in model.parameters()])

    for algorithm in (
        "da-sgd(period=2, delay=1, compensate=false)",
        "da-sgd(period=2, delay=0)",
        "diloco(period=4, outer=sgd(rate=1), delay=1)",
    ):
        models = []
        for workers in (5, 7):
            final = []
            pl.simulate(loop, workers=workers, algorithm=algorithm)
            models.append(final[0])
            assert final[0][0].dtype == torch.bfloat16
        assert all(torch.equal(a, b) for a, b in zip(*models, strict=True))


# Delays that are chosen


@pytest.mark.parametrize(("bandwidth", "expected"), [(1e12, 1), (4e7, 2), (1.3e7, 5), (1e6, 8)])
def test_auto_takes_the_smallest_delay_that_hides_the_average(bandwidth, expected):
    """8 MB among 4 workers over a ring: 12 MB each; a step takes 0.2 s."""
    cluster = pl.Cluster(workers=4, compute_s=0.2, bandwidth_bytes_per_s=bandwidth, latency_s=1e-5)
    settings = {"cluster": cluster, "timing_only": True, "num_parameters": 2_000_000}

    def simulated(algorithm):
        return pl.simulate_task(pl.TrainConfig(task="digits-mlp", algorithm=algorithm, steps=200), **settings).result

    auto = simulated("da-sgd(period=8, delay=auto)")
    assert auto["delay"] == expected
    assert auto["progress_factor"] == pytest.approx(1 - 0.75 * expected / 8)
    if 1 < expected < 8:
        # Waiting with the delay that was chosen, and with one that is too short: the control.
        waits = [simulated(f"da-sgd(period=8, delay={delay})")["wall_s"] for delay in (expected, expected - 1)]
        plain = simulated("local-sgd(period=1000)")["wall_s"]
        assert waits[0] < 1.05 * plain
        assert waits[1] > 1.005 * waits[0]


# What is chosen follows from times that are measured, so that a busy machine may choose a delay that is warned of.
@pytest.mark.filterwarnings("ignore:delay=auto has chosen:paceline.errors.AlgorithmWarning")
def test_auto_on_real_workers_is_the_same_on_all():
    run, model = run_loop("da-sgd(period=8, delay=auto)", 3, 120, "threads")
    assert 1 <= run.result["delay"] <= 8
    assert all(torch.isfinite(p).all() for p in model)


# Fragments


def test_fragments_have_every_tensor_once_and_are_about_as_large():
    ranges = ((16, 116), (128, 138), (144, 244), (256, 296), (304, 310), (320, 350))
    for number in range(2, 7):
        dealt = cut(ranges, 400, number)
        assert sorted(one for fragment in dealt for one in fragment.ranges) == list(ranges)
        sizes = [sum(end - begin for begin, end in fragment.ranges) for fragment in dealt]
        assert max(sizes) - min(sizes) <= 100
    x = torch.arange(400.0)
    y = torch.zeros(400)
    for fragment in dealt:
        fragment.put(y, fragment.of(x))
    assert all(torch.equal(x[begin:end], y[begin:end]) for begin, end in ranges)


def test_every_fragment_leaves_once_in_a_period_at_steps_of_its_own():
    for period, number in [(1, 1), (5, 3), (7, 7), (10, 4)]:
        schedule = Schedule(period, num_fragments=number)
        left = [schedule.leaving(k) for k in range(period + 1, 2 * period + 1)]
        assert sorted(itertools.chain(*left)) == list(range(number))
        assert max(map(len, left)) == 1


# Bad input


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("da-sgd(delay=5)", "A delay of 5 steps is above the period of 4, .*: write delay=4 or less"),
        ("da-sgd(delay=4, local_weight=0)", "the model never changes"),
        ("da-sgd(delay=-1)", "delay of DaSGD must be 0 or more"),
        ("da-sgd(delay=soon)", "must be a whole number or one of auto"),
        ("da-sgd(local_weight=1)", "from 0 to below 1"),
        ("da-sgd(merge=cocod, local_weight=0.5)", "cocod always merges the whole mean"),
        ("da-sgd(merge=corected)", "Did you mean 'corrected'"),
        ("diloco(period=10, fragments=5, delay=2)", "every 2 steps: write delay=1 or less"),
        ("diloco(period=10, delay=10)", "the model never changes"),
        ("diloco(period=10, delay=10, local_weight=0.5)", "write delay=9 or less"),
        ("diloco(period=3, fragments=4)", "4 fragments cannot be sent at different steps of a period of 3"),
        ("diloco(outer=adam)", "Unknown outer optimizer .adam.. Known: sgd, nesterov"),
        ("diloco(outer=nesterov(rate=0))", "rate of Nesterov must be a number above 0"),
        ("diloco(outer=nesterov(momentum=1))", "momentum of Nesterov must be from 0 to below 1"),
    ],
)
def test_refused_in_a_sentence(spec, says):
    with pytest.raises(pl.UsageError) as error:
        pl.parse(spec)
    assert re.search(says, str(error.value)), str(error.value)
    assert "\n" not in str(error.value)


def test_more_fragments_than_tensors():
    with pytest.raises(
        pl.UsageError, match="A model of 4 parameter tensors cannot be split into 5 fragments: write fragments=4"
    ):
        pl.simulate(Loop(20), workers=2, algorithm="diloco(period=10, fragments=5)")


def test_where_few_steps_are_left_the_warning_says_what_the_rate_becomes():
    """0.1 of the progress: with a rate of 0.2, steps of 2."""
    longer = pl.parse("da-sgd(delay=4, local_weight=0.1)").caution(2)
    assert "leaves 0.10 of the progress" in longer
    assert "learning rate is multiplied by 10 " in longer
    assert "compensate=false" in longer
    assert "learning rate" not in pl.parse("da-sgd(delay=4, local_weight=0.1, compensate=false)").caution(2)
    assert "learning rate" not in pl.parse("diloco(period=4, delay=3)").caution(2)


def test_a_delay_that_costs_most_of_the_progress_is_warned_of():
    with pytest.warns(AlgorithmWarning, match=r"leaves 0\.44 of the progress"):
        pl.simulate(Loop(20), workers=2, algorithm="da-sgd(delay=3)")


# Checkpoints


def test_a_checkpoint_of_another_method_begins_anew_from_the_mean(tmp_path):
    """Averages under way of models are no changes for an outer optimizer, and the other way round."""
    settings = {"task": LINEAR, "workers": 3, "backend": "threads", "batch_size": 7}
    for first, second in (
        ("da-sgd(period=5, delay=4, merge=corrected)", "diloco(period=5, delay=4, local_weight=0.5)"),
        ("diloco(period=5, delay=4, local_weight=0.5)", "da-sgd(period=5, delay=4, merge=corrected)"),
        ("local-sgd", "diloco(period=5)"),
    ):
        folder = tmp_path / re.sub(r"\W", "", first)
        pl.train(pl.TrainConfig(algorithm=first, epochs=1, **settings), out=folder)
        run = pl.train(pl.TrainConfig(algorithm=second, epochs=3, **settings), resume=folder)
        assert run.result["outcome"] == "stopped"
        assert run.result["test_accuracy"] > 0.8


UNDER_WAY = {
    "task": "digits-mlp",
    "workers": 2,
    "backend": "threads",
    "algorithm": "diloco(period=5, delay=4, local_weight=0.5)",
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """The folder of a run with an average under way, of which tests damage copies."""
    folder = tmp_path_factory.mktemp("under way") / "run"
    pl.train(pl.TrainConfig(epochs=1, **UNDER_WAY), out=folder)
    return folder


@pytest.mark.parametrize("workers", [[1], [0, 1]], ids=str)
@pytest.mark.parametrize(
    "change",
    [
        {"flights": [{"fragment": 7, "due": 3, "sent": torch.zeros(3)}]},
        {"flights": [{"fragment": 0, "due": 3, "sent": torch.zeros(3)}]},
        {"flights": 3},
        {"rule": {"anchors": [torch.zeros(3)], "momenta": {}}},
        {"rule": {"anchors": 3}},
        {"means": {}},
        {"schedule": [5, "4", 1]},
        {"of_changes": None},
    ],
)
def test_a_damaged_state_is_refused_in_a_sentence(change, workers, ended, tmp_path):
    folder = shutil.copytree(ended, tmp_path / "run")
    newest = checkpoint_files.newest(folder / "checkpoint")
    program = {**checkpoint.load_program(newest, 0), **change}
    for worker in workers:
        rewrite(newest, f"worker-{worker}.pt", program={key: one for key, one in program.items() if one is not None})
    with pytest.raises(pl.UsageError, match=r"does not fit this run: of .*\. Resume with the task, the layout"):
        pl.train(pl.TrainConfig(epochs=2, **UNDER_WAY), resume=folder)
