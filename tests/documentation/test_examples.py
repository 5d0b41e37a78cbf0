"""Every example runs as its first lines say, and prints what a reader wants to know."""

import json
import re

import pytest

from .conftest import ROOT

ACCURACY = r"test accuracy +0\.[5-9]\d*"
SAYS = {
    "sequential": [ACCURACY, "equal bit for bit"],
    "lockstep": [ACCURACY, r"staleness: 0\.0", r"share of the time spent waiting, workers 0, 1, 2: \d+%, \d+%, \d+%"],
    "all_reduce": [ACCURACY, "with 2 workers", "90 updates of 2874 samples, staleness 0"],
    "quantized": [ACCURACY, "with 2 workers", r"180 updates, [45]\.\d\d bits per element"],
    "ad_psgd": [ACCURACY, r"720 gradients, [01]\.\d+ averages of a pair for each"],
    "da_sgd": [
        ACCURACY,
        r"local-sgd\(period=4\): [\d.]+ s of virtual time, averages 0 steps late, progress factor 1\.00",
        r"da-sgd\(period=8, delay=auto\): [\d.]+ s of virtual time, averages 3 steps late, progress factor 0\.72",
        r"da-sgd\(delay=3, merge=corrected\): [\d.]+ s of virtual time, averages 3 steps late, progress factor 1\.00",
    ],
    "diloco": [
        ACCURACY,
        r"all-reduce: [\d.]+ s of virtual time, 54\.3 KB sent per gradient",
        r"diloco\(period=20, outer=sgd\): [\d.]+ s of virtual time, 2\.\d KB sent per gradient",
        r"diloco\(period=20, fragments=4, delay=4\): [\d.]+ s of virtual time, 2\.\d KB sent per gradient",
    ],
    "parameter_server": [
        ACCURACY,
        r"parameter-server: 90 updates in [\d.]+ s of virtual time, 0 gradients dropped, mean staleness 0\.00",
        r"parameter-server\(mode=sync\(backups=1\)\): \d+ updates in .*, [1-9]\d* gradients dropped",
        r"mode=async, shards=2\): 360 updates in .* 0 gradients dropped, mean staleness [1-4]\.",
        r"mode=bounded\(clock_bound=4\)\): 360 updates in .* 0 gradients dropped, mean staleness [1-4]\.",
    ],
    "downpour": [
        ACCURACY,
        r"downpour\(warm_start_steps=50\): 360 updates of 360 gradients in [\d.]+ s of virtual time, \d+ KB sent per gradient",
        r"downpour\(fetch=5, push=5, warm_start_steps=50\): [78]\d updates of 360 gradients",
        r"adaptive-revision: 360 updates of 360 gradients",
    ],
    "recommender": [r"test accuracy 0\.[56]\d*", r"1000 updates, 1[0-9]\.\d KB sent per step"],
    "lbfgs": [ACCURACY, r"(?s)loss (0\.\d{4})\d+, .*\nloss \1"],
    "locked": [ACCURACY, r"locked\(kind=rwlock\)", r"locked\(backoff=exponential\(cap=16\)\)", r"samples/s, waiting"],
    "hogwild": [ACCURACY, r"staleness: [\d.]+ on average", r"0: +\d+ #"],
    "mnist": [ACCURACY],
    "leashed": [ACCURACY, r"after the gradient 0\.000\nlost races: (\d+), dropped gradients: \1\n"],
}


def test_every_example_is_tested():
    elsewhere = {"digits", "my_task", "checks"}  # by pages
    elsewhere |= {"char_gpt", "placement", "tensor_parallel"}  # in tests/processes and tests/model_parallel
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == {*SAYS, *elsewhere}


@pytest.mark.parametrize("name", SAYS)
def test_example(name, shell):
    text = (ROOT / "examples" / f"{name}.py").read_text()
    assert f"\n    python examples/{name}.py [EPOCHS]\n" in text
    assert len(text.splitlines()) < 60
    printed = shell(f"PACELINE_DATA= python examples/{name}.py 2", anew=name == "hogwild")  # the digits in the wheel
    for pattern in SAYS[name]:
        assert re.search(pattern, printed), f"{pattern}\n{printed}"


def test_own_task(shell):
    command = re.search(r"paceline train .*", (ROOT / "examples" / "my_task.py").read_text())
    printed = shell(f"{command[0]} --epochs 20 --out runs/spirals")
    assert float(re.search(r"test accuracy +([\d.]+) %", printed)[1]) > 80, printed


def test_ad_psgd_in_workers_that_outlive_each_other(shell):
    printed = shell("paceline launch --workers 2 --out runs/joined -- examples/ad_psgd.py 4")
    assert re.search(ACCURACY, printed)
    assert len(re.findall(r"mean staleness [\d.]+, consensus distance [\d.e-]+\n", printed)) == 2, printed
    assert re.search(r"updates +1,440\b", printed), printed


def test_ad_psgd_under_torchrun_and_simulated_is_the_same_function(shell):
    figures = r"mean staleness [\d.]+, consensus distance [\d.e-]+\n"
    printed = shell("python -m torch.distributed.run --standalone --nproc-per-node 4 examples/ad_psgd.py 4")
    assert re.search(ACCURACY, printed)
    assert len(re.findall(figures, printed)) == 4, printed
    simulated = shell("python examples/ad_psgd.py 4 --simulate 16")
    assert re.search(ACCURACY, simulated)
    assert re.search(figures, simulated)
    slow = re.search(r"share of updates ([\d.]+)%", simulated)
    assert 0.4 < float(slow[1]) < 1.2, "a tenth of the others' share is 0.66 %"


def test_quantized_under_torchrun_and_simulated(shell):
    printed = shell("python -m torch.distributed.run --standalone --nproc-per-node 2 examples/quantized.py 4")
    assert re.search(ACCURACY, printed)
    printed = shell("python examples/quantized.py 2 --simulate 4")
    plain, coded = (float(one) for one in re.findall(r"([\d.]+) kB sent per step", printed))
    assert coded < 0.3 * plain  # 5,000 parameters: frames count


def test_mnist_stops_at_an_accuracy(shell):
    options = "--workers 2 --algorithm leashed --target-accuracy 0.6 --out runs/mnist --json"
    printed = shell(f"PACELINE_DATA= paceline launch examples/mnist.py:train {options}")
    result = json.loads(next(line for line in printed.splitlines() if line.startswith("{")))
    assert (result["outcome"], result["task"], result["algorithm"]) == ("converged", "train", "leashed")
    assert result["test_accuracy"] >= 0.6
    assert result["time_to_target_s"] > 0
