"""Two attempts at one partition that live at the same time, as Spark's speculation starts them: every update counts once.

Spark starts no second attempt on the machine of the first, so the attempts are threads here, and all else is as in Spark.
"""

import threading
import types

import pytest
import torch
from torch import nn

pytest.importorskip("pyspark", reason="needs the extra: pip install 'paceline[spark]'")
pytest.importorskip("pyarrow", reason="needs the extra: pip install 'paceline[spark]'")
import pyarrow
from pyspark import TaskContext, cloudpickle

import paceline as pl
from paceline.algorithms.server import client

ROWS, BATCH, EPOCHS = 1000, 16, 3
LIMIT_S = 60
pytestmark = pytest.mark.filterwarnings("default")
mine = threading.local()  # .context of the attempt that this thread is, .calls of gradient


class Events:
    """Where the attempts have come to: gradient is sent by name, so that both have these."""

    first_waits = threading.Event()
    second_is_on = threading.Event()
    first_has_left = threading.Event()


def gradient(model, batch):
    mine.calls += 1
    attempt = mine.context.attemptNumber()
    if attempt == 0 and mine.calls == 35:
        Events.first_waits.set()
        assert Events.second_is_on.wait(LIMIT_S)
    if attempt == 1 and mine.calls == 25:
        Events.second_is_on.set()
    if attempt == 1 and mine.calls == 60:  # the job goes on until the first attempt has found out
        assert Events.first_has_left.wait(LIMIT_S)
    return {"weight": batch["number"].sum().view(1, 1)}


def added(model, update):
    model.weight += update["weight"]


class TwoAttempts:
    """A DataFrame of one partition, whose task is started a second time when the first one is slow."""

    sparkSession = types.SimpleNamespace(conf={})  # noqa: N815  # which says nothing, as in Spark Connect

    def __init__(self):
        self.errors = []

    def coalesce(self, _):
        return self

    def mapInArrow(self, function, _):  # noqa: N802  # Spark's name
        self.sent = cloudpickle.dumps(function)
        return self

    def _attempt(self, number):
        mine.calls = 0
        mine.context = types.SimpleNamespace(
            partitionId=lambda: 0, taskAttemptId=lambda: 7 + 4 * number, attemptNumber=lambda: number, cpus=lambda: 1
        )
        numbers = pyarrow.array([float(one) for one in range(ROWS)])
        batches = [pyarrow.RecordBatch.from_arrays([numbers], names=["number"])]
        function = cloudpickle.loads(self.sent)
        return [row for batch in function(iter(batches)) for row in batch.to_pylist()]

    def _first(self):
        try:
            self._attempt(0)
        except Exception as error:
            self.errors.append(error)
        finally:
            Events.first_has_left.set()

    def collect(self):
        self.first = threading.Thread(target=self._first)
        self.first.start()
        assert Events.first_waits.wait(LIMIT_S)
        rows = self._attempt(1)  # to its end, which is the job's
        return [types.SimpleNamespace(asDict=lambda row=row: row) for row in rows]


@pytest.mark.parametrize("spec", ["downpour", "downpour(fetch=10,push=10)", "downpour(fetch=3,push=2)"])
def test_a_second_attempt_while_the_first_lives_repeats_no_update(spec, monkeypatch):
    monkeypatch.setattr(TaskContext, "get", lambda: mine.context)
    monkeypatch.setattr(
        client, "_RETURN_DEADLINE_S", 1.0
    )  # in which a server that has another's connection would answer
    for event in ("first_waits", "second_is_on", "first_has_left"):
        monkeypatch.setattr(Events, event, threading.Event())
    model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    nn.init.zeros_(model.weight)
    data = TwoAttempts()
    dd = pl.spark.DeepDist(model, spec, workers=1, host="127.0.0.1")
    told = dd.train(data, gradient, added, EPOCHS, batch_size=BATCH)
    data.first.join(LIMIT_S)
    assert not data.first.is_alive()
    assert model.weight.item() == EPOCHS * sum(range(ROWS))
    assert (told.samples, told.restarts) == (EPOCHS * ROWS, 1)
    (error,) = data.errors
    assert str(error) == "A newer attempt has taken over partition 0: this one ends."
