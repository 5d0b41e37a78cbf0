"""DeepDist in real Spark: models learn, and whatever dies, every update counts once and the first cause is named."""

import builtins
import os
import re
import signal
import socket
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

import forked
import paceline as pl
from integrations.spark_sessions import end_java, meetings_elsewhere, session
from paceline.errors import PacelineError, UsageError
from paceline.integrations import spark_job
from paceline.integrations.spark_failures import first_cause
from paceline.integrations.spark_job import num_workers
from real_data import FOLDER, needs_mnist

pytestmark = pytest.mark.filterwarnings("default")

ROWS, BATCH, EPOCHS = 1000, 16, 3
SUM = EPOCHS * sum(range(ROWS))  # of what `summed` pushes: each row's number, once in every epoch


def soak(*values):
    """A case for `make soak-integrations`: what it goes through, others do, too, and it takes longer."""
    return pytest.param(*values, marks=pytest.mark.soak)


@pytest.fixture(scope="module", params=["local[2,4]", soak("local-cluster[2,1,1024]")])
def spark(request):
    own = session(request.param)
    num_workers("This test", own.range(1), 2, forked.AGAINST_HANGS_S)  # executors come later than the session
    yield own
    own.stop()


@pytest.fixture(scope="module", autouse=True)
def _no_process_is_left():
    yield
    end_java()


def numbers(spark):
    return spark.range(0, ROWS, 1, 2).selectExpr("cast(id as double) as number")


def scales():
    model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    nn.init.zeros_(model.weight)
    return model


def summed(model, batch):
    return {"weight": batch["number"].sum().view(1, 1)}


def added(model, update):
    model.weight += update["weight"]


def classified(features, classes, rate):
    """A logistic regression, and the two functions that train it."""

    def gradient(model, batch):
        nn.functional.cross_entropy(model(batch["features"].float()), batch["label"]).backward()
        return [parameter.grad for parameter in model.parameters()]

    def descent(model, update):
        for name, parameter in model.named_parameters():
            parameter -= rate * update[name]

    torch.manual_seed(3)
    return nn.Linear(features, classes), gradient, descent


def test_logistic_regression_learns_digits(spark):
    x, y = load_digits(return_X_y=True)
    x = x / 16
    data = spark.createDataFrame(
        [(row.tolist(), int(label)) for row, label in zip(x, y, strict=True)], ["features", "label"]
    )
    model, gradient, descent = classified(64, 10, rate=0.1)
    seen = []
    with pl.spark.DeepDist(model, algorithm="downpour(fetch=10,push=10)") as dd:
        told = dd.train(data, gradient, descent, epochs=8, batch_size=16, on_progress=seen.append)
    found = model(torch.tensor(x, dtype=torch.float32)).argmax(1).numpy()
    assert dd.model is model
    assert np.mean(found == y) > 0.93
    assert told.samples == 8 * len(y)
    assert (told.partitions, told.restarts) == (2, 0)
    assert seen[-1].version == told.updates
    assert seen[-1].share_done == 1.0
    assert [one.worker_id for one in seen[-1].workers] == [0, 1]
    assert all(parameter.grad is None for parameter in model.parameters())


@needs_mnist
@pytest.mark.soak
def test_logistic_regression_learns_mnist(spark, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as parquet

    from paceline.tasks.readers import read_idx

    images = read_idx(FOLDER / "mnist" / "train-images-idx3-ubyte.gz")[:12_000].reshape(12_000, -1)
    labels = read_idx(FOLDER / "mnist" / "train-labels-idx1-ubyte.gz")[:12_000]
    x = torch.tensor(np.array(images), dtype=torch.float32) / 255
    column = pa.FixedSizeListArray.from_arrays(pa.array(x[:10_000].flatten().numpy()), 784)
    for part in range(2):
        own = slice(5_000 * part, 5_000)
        table = pa.table(
            {
                "features": column.slice(own.start, own.stop),
                "label": labels[:10_000][own.start :][: own.stop].astype(np.int64),
            }
        )
        parquet.write_table(table, tmp_path / f"{part}.parquet")
    model, gradient, descent = classified(784, 10, rate=0.05)
    dd = pl.spark.DeepDist(model)
    told = dd.train(spark.read.parquet(str(tmp_path)), gradient, descent, epochs=2, batch_size=32)
    found = model(x[10_000:]).argmax(1).numpy()
    assert told.samples == 20_000
    assert np.mean(found == labels[10_000:]) > 0.87


@pytest.mark.parametrize(
    ("spec", "updates"),
    [
        soak("downpour", 2 * EPOCHS * 32),
        soak("downpour(fetch=10,push=10)", 2 * 10),
        ("downpour(fetch=3,push=2)", 2 * 48),
    ],
)
def test_python_workers_killed_five_times_lose_and_repeat_no_update(spark, spec, updates):
    deaths = {0: (1, 40, 20), 1: (22, 70)}  # partition -> by attempt, the call that is its last
    calls = []

    def gradient(model, batch):
        from pyspark import TaskContext

        calls.append(1)
        context = TaskContext.get()
        if deaths[context.partitionId()][context.attemptNumber() :][:1] == (len(calls),):
            os.kill(os.getpid(), signal.SIGKILL)
        return summed(model, batch)

    model = scales()
    told = pl.spark.DeepDist(model, spec).train(numbers(spark), gradient, added, EPOCHS, batch_size=BATCH)
    assert told.restarts == 5
    assert model.weight.item() == SUM
    assert (told.updates, told.steps, told.samples) == (updates, 2 * EPOCHS * 32, ROWS * EPOCHS)


def test_an_update_whose_sender_dies_before_it_is_answered_counts_once(spark, tmp_path):
    """The master itself kills the worker while it applies that worker's update."""

    def gradient(model, batch):
        (tmp_path / "pid").write_text(str(os.getpid()))
        return summed(model, batch)

    killed = []

    def descent(model, update):
        added(model, update)
        if len(killed) < 3 and float(update["weight"]) > 0:
            killed.append(int((tmp_path / "pid").read_text()))
            os.kill(killed[-1], signal.SIGKILL)

    model = scales()
    told = pl.spark.DeepDist(model, "downpour", workers=1).train(
        numbers(spark), gradient, descent, EPOCHS, batch_size=BATCH
    )
    assert len(set(killed)) == told.restarts == 3
    assert model.weight.item() == SUM
    assert told.updates == EPOCHS * 63
    assert told.mean_staleness == 0


def test_a_failure_that_passes_is_made_good(spark):
    def gradient(model, batch):
        from pyspark import TaskContext

        if TaskContext.get().attemptNumber() < 2:
            raise OSError("the disk is away")
        return summed(model, batch)

    model = scales()
    told = pl.spark.DeepDist(model).train(numbers(spark), gradient, added, EPOCHS, batch_size=BATCH)
    assert (model.weight.item(), told.restarts) == (SUM, 4)


def test_updates_may_be_left_out(spark):
    def gradient(model, batch):
        keep = batch["number"] < 100
        return {"weight": batch["number"][keep].sum().view(1, 1)} if keep.any() else None

    model = scales()
    told = pl.spark.DeepDist(model, "downpour(fetch=2,push=2)").train(numbers(spark), gradient, added, batch_size=1)
    assert model.weight.item() == sum(range(100))
    assert told.steps == told.samples == 100


def test_more_partitions_than_slots_are_put_together_and_some_may_be_empty(spark):
    data = numbers(spark).repartition(7).where("number < 3")
    model = scales()
    told = pl.spark.DeepDist(model).train(data, summed, added, EPOCHS, batch_size=BATCH)
    assert model.weight.item() == 3 * EPOCHS
    assert told.partitions <= 2
    none = pl.spark.DeepDist(model).train(data.where("number < 0"), summed, added)
    assert (none.updates, none.steps, none.mean_staleness) == (0, 0, None)


# What goes wrong is one sentence, with the first cause


def refused(spark, gradient=summed, descent=added, data=None, train=(), **settings):
    with pytest.raises(PacelineError) as caught:
        pl.spark.DeepDist(scales(), **settings).train(
            data if data is not None else numbers(spark), gradient, descent, *train
        )
    (sentence,) = str(caught.value).splitlines()
    return sentence


def test_a_gradient_that_fails_is_named_with_its_line(spark):
    def gradient(model, batch):
        return 1 / (0 * len(batch["number"]))

    line = gradient.__code__.co_firstlineno + 1
    sentence = refused(spark, gradient)
    cause = rf"ZeroDivisionError: .*by zero \(test_spark.py, line {line}\)\."
    assert re.fullmatch(rf"The training failed, first in partition [01]: {cause}", sentence)


@pytest.mark.parametrize(
    ("update", "what"),
    [
        ({"wieght": 1}, "gradient returned 'wieght', but the model's parameters are weight"),
        soak({"weight": torch.zeros(1)}, r"gradient returned 'weight' of shape \(1,\), but the parameter has \(1, 1\)"),
        soak([1, 2], "gradient returned 2 arrays for a model of 1 parameters"),
        soak("weight", "gradient returned str: return a dict of arrays .* or None"),
    ],
)
def test_an_update_of_another_form_is_refused(spark, update, what):
    assert re.search(f"first in partition [01]: {what}", refused(spark, lambda model, batch: update))


def test_a_descent_that_fails_is_named_and_not_what_follows(spark):
    def descent(model, update):
        raise KeyError("momentum")

    assert refused(spark, descent=descent, algorithm="downpour") == "descent failed: KeyError: 'momentum'."


def test_a_worker_that_is_killed_each_time_is_given_up(spark):
    def gradient(model, batch):
        os.kill(os.getpid(), signal.SIGKILL)

    assert re.match(
        r"Spark ended the training: the Python worker of task [01] ended without a word, 4 times \(killed,",
        refused(spark, gradient),
    )


@pytest.mark.parametrize("before", ["Thrown from the Python worker:\n", "[PYTHON_EXCEPTION] Thrown from the worker: "])
def test_what_spark_itself_raises_in_a_task_is_said_with_its_last_line(before):
    text = before + "Traceback (most recent call last):\n  File x\n    y\n{}\n\nDriver:"
    nobody = types.SimpleNamespace(check=lambda keys: False)
    cause = first_cause(RuntimeError(text.format("ModuleNotFoundError: No module named 'mine'")), nobody, 2)
    assert "a task raised ModuleNotFoundError: No module named 'mine': make it known to the executors" in cause
    cause = first_cause(RuntimeError(text.format("OSError: full")), nobody, 2)
    assert cause == "Spark ended the training: a task raised OSError: full."


def test_too_few_slots_are_said_before_anything_starts(spark):
    sentence = refused(spark, workers=3, deadline_s=0.0)
    assert re.match(
        r"DeepDist needs 3 free slots, one for each worker, and Spark has 2 \(local.*\): give workers=2", sentence
    )


def test_a_driver_that_no_task_reaches_is_said(spark, monkeypatch):
    with meetings_elsewhere() as (far, elsewhere):
        monkeypatch.setattr(spark_job, "JoinPoint", far)
        sentence = refused(spark, deadline_s=0.1)
    assert re.fullmatch(
        rf"The task of partition [01] cannot reach the driver at {elsewhere} within 0.1 s: give"
        r" DeepDist\(host=...\) an address of the driver's machine that executors can reach\.",
        sentence,
    )


def test_a_host_that_is_not_this_machine_is_said(spark):
    assert refused(spark, host="192.0.2.77").startswith("Cannot listen at 192.0.2.77:0: ")


@pytest.mark.parametrize("name", ["epochs", "batch_size"])
def test_numbers_below_one_are_refused(spark, name):
    with pytest.raises(UsageError, match=f"{name} of DeepDist.train must be a whole number of 1 or more, not 0"):
        pl.spark.DeepDist(scales()).train(numbers(spark), summed, added, **{name: 0})


# The wire


def own_address():
    """An address of this machine that is not loopback, or an empty text."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return ""
        return probe.getsockname()[0]


@pytest.mark.skipif(own_address() in ("", "127.0.0.1"), reason="this machine has no address but loopback")
def test_between_machines_everything_is_encrypted_with_a_key_that_only_the_tasks_get(spark, monkeypatch):
    made = []
    new_keys = spark_job.new_keys
    monkeypatch.setattr(spark_job, "new_keys", lambda: made.append(new_keys()) or made[-1])

    def gradient(model, batch):
        from pyspark import TaskContext

        assert TaskContext.get().getLocalProperty("nothing") is None
        mine = Path("/proc/self/environ").read_bytes() + Path("/proc/self/cmdline").read_bytes()
        assert b"PACELINE_KEY" not in mine
        return summed(model, batch)

    model = scales()
    dd = pl.spark.DeepDist(model, host=own_address())
    told = dd.train(numbers(spark), gradient, added, EPOCHS, batch_size=BATCH)
    assert (model.weight.item(), told.restarts) == (SUM, 0)
    (keys,) = made
    assert keys.secret.decode() not in spark.sparkContext.getConf().toDebugString()


# Without Spark's help


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"algorithm": "ad-psgd"}, "DeepDist's tasks fetch and push like downpour, not like ad-psgd"),
        (
            {"algorithm": "downpour(shards=2,warm_start_steps=5)"},
            "so warm_start_steps, shards have no effect: leave it out",
        ),
        ({"workers": 0}, "workers of DeepDist must be 1 or more, not 0"),
    ],
)
def test_arguments_without_a_meaning_are_refused(arguments, sentence):
    with pytest.raises(UsageError, match=re.escape(sentence)):
        pl.spark.DeepDist(scales(), **arguments)


def test_a_model_of_another_kind_is_refused():
    with pytest.raises(UsageError, match=r"DeepDist trains a torch.nn.Module, not dict\."):
        pl.spark.DeepDist({})


def test_without_the_package_the_extra_is_named(monkeypatch):
    imported = builtins.__import__

    def refusing(name, *arguments, **settings):
        if name.partition(".")[0] == "pyspark":
            raise ImportError(name)
        return imported(name, *arguments, **settings)

    monkeypatch.setattr(builtins, "__import__", refusing)
    with pytest.raises(UsageError, match=re.escape("pip install 'paceline[spark]'")):
        pl.spark.DeepDist(scales())


def test_importing_it_needs_no_spark():
    program = "import sys, paceline as pl; pl.spark.DeepDist; assert not {'pyspark', 'pyarrow'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
