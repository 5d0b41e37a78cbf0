"""What `pl.spark.launch` and DeepDist are made of, without a Spark: rows, what tasks tell, and a task on its own."""

import contextlib
import json
import socket
import types

import numpy as np
import pytest
import torch
import torch.distributed as dist

pytest.importorskip("pyarrow", reason="needs the extra: pip install 'paceline[spark]'")
pytest.importorskip("pyspark", reason="needs the extra: pip install 'paceline[spark]'")

import pyarrow
import pyspark

import paceline as pl
from paceline.errors import PacelineError, UsageError
from paceline.integrations import spark_worker
from paceline.integrations.spark_failures import first_told, make_good, tell
from paceline.integrations.spark_loop import FAILURE
from paceline.integrations.spark_rows import Rows, SpilledRows, spilled
from paceline.membership.join_point import JoinPoint
from paceline.transport.keys import new_keys

KEYS = new_keys()


def batches(*sizes):
    first = 0
    for size in sizes:
        numbers = np.arange(first, first + size)
        yield pyarrow.RecordBatch.from_pydict(
            {
                "number": numbers,
                "pair": [[float(one), -float(one)] for one in numbers],
                "word": [str(n) for n in numbers],
            }
        )
        first += size


@pytest.fixture
def rows():
    with spilled(batches(3, 1, 4)) as file:
        yield Rows(SpilledRows(file.fileno()), seed=0)


@pytest.mark.parametrize("asked", [[5, 2], [2, 5], [7, 0, 3, 1, 6], [4, 4, 0], [1], range(8)])
def test_rows_come_in_the_order_that_was_asked_for(rows, asked):
    batch = rows[asked]
    assert batch["number"].tolist() == list(asked)
    torch.testing.assert_close(batch["pair"], torch.tensor([[one, -one] for one in asked], dtype=torch.float64))
    assert batch["word"] == [str(one) for one in asked]


def test_rows_that_are_not_there_are_refused(rows):
    assert [int(one["number"]) for one in rows] == list(range(8))  # Python ends this at an IndexError
    with pytest.raises(IndexError, match=r"rows has no row -1, only rows 0 to 7\."):
        rows[[3, -1]]
    with pytest.raises(IndexError, match="no row 8"):
        rows[[8, 3]]
    with pytest.raises(UsageError, match=r"rows\[\[\]\] asks for a batch without rows"):
        rows[[]]


@pytest.fixture
def join_point():
    with contextlib.closing(JoinPoint("127.0.0.1:0", KEYS, 15.0, role="holder")) as own:
        yield own


def test_an_error_takes_the_place_of_what_its_partition_told_before(join_point):
    tell(join_point, 0, "others have ended", "follows")
    tell(join_point, 1, "its process was killed", "died")
    assert first_told(join_point, 2) == "its process was killed"
    tell(join_point, 0, "the cause")
    tell(join_point, 1, "a later cause")
    tell(join_point, 0, "a second error")
    tell(join_point, 0, "others have ended again", "follows")
    assert first_told(join_point, 2, "raised") == "the cause"
    make_good(join_point, 0)
    assert first_told(join_point, 2) == "a later cause"


def task_of(join_point, monkeypatch, attempt, failure):
    """A task's run in ordinary tasks, whose loop fails so."""
    context = types.SimpleNamespace(partitionId=lambda: 0, attemptNumber=lambda: attempt, cpus=lambda: 1)
    monkeypatch.setattr(pyspark.TaskContext, "get", lambda: context)

    def fails(loop):
        (loop.folder / FAILURE).write_text(json.dumps(failure), encoding="utf-8")
        return 1

    monkeypatch.setattr(spark_worker, "_run", fails)
    return spark_worker.WorkerTask(join_point.address, KEYS, b"", "ad-psgd", 2, False, 0, 15.0, 60.0)


FULL = {"said": "partition 0: All 2 places are taken.", "is_ours": True, "follows": False}


def test_a_later_attempt_that_finds_no_place_is_no_cause(join_point, monkeypatch):
    task = task_of(join_point, monkeypatch, 1, FULL)
    with pytest.raises(PacelineError, match="places are taken"):
        task.run(batches(3))
    assert first_told(join_point, 2, "raised", "died") == ""
    assert first_told(join_point, 2) == FULL["said"]
    join_point.set("ending", "1")
    assert task.run(batches(3)) == []


@pytest.mark.parametrize(("attempt", "is_ours"), [(0, True), (1, False)])
def test_an_error_of_a_first_attempt_or_of_the_users_is_a_cause(join_point, monkeypatch, attempt, is_ours):
    task = task_of(join_point, monkeypatch, attempt, {"said": "wrong", "is_ours": is_ours, "follows": False})
    with pytest.raises(PacelineError, match="wrong"):
        task.run(batches(3))
    assert first_told(join_point, 2, "raised") == "wrong"


def test_events_that_are_gone_are_said(join_point, monkeypatch):
    task = task_of(join_point, monkeypatch, 0, {})

    def ends(loop):
        (loop.folder / "worker-1.json").write_text(json.dumps({"worker": 1, "state": "ended"}), encoding="utf-8")
        return 0

    monkeypatch.setattr(spark_worker, "_run", ends)
    with pytest.raises(
        PacelineError, match=r"partition 0: the worker's events-1\.jsonl is gone: make sure that nothing deletes"
    ):
        task.run(batches(3))
    assert "events-1.jsonl" in first_told(join_point, 2, "raised")


def test_the_store_of_a_barrier_stage_listens_at_one_address(join_point):
    store = spark_worker._open_store(join_point)
    own = dist.TCPStore("127.0.0.1", store.port, is_master=False)
    own.set("key", "value")
    assert store.get("key") == b"value"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", store.port), timeout=10.0)


def started_by_deep_dist(data):
    pl.spark.DeepDist(torch.nn.Linear(1, 1), workers=2).train(data, lambda *_: None, lambda *_: None)


def started_by_launch(data):
    pl.spark.launch(print, data=data, workers=2, algorithm="ad-psgd")


@pytest.mark.parametrize("start", [started_by_deep_dist, started_by_launch])
def test_speculation_is_refused_where_a_partition_has_one_place(start):
    data = types.SimpleNamespace(sparkSession=types.SimpleNamespace(conf={"spark.speculation": "true"}))
    with pytest.raises(UsageError, match=r"start Spark with spark\.speculation=false"):
        start(data)
