"""`train` under a layout: what all-reduce comes to without one, in whole checkpoints, whatever the number of groups."""

import dataclasses
from pathlib import Path

import pytest
import torch

import paceline as pl
from model_parallel.hybrid.rooms import small_vgg
from paceline.model_parallel.hybrid.worker_part import WorkerPart
from paceline.model_parallel.layouts import layout_of
from paceline.records import checkpoint_contents as contents
from paceline.records import checkpoint_files as files
from paceline.records.run_data import RunData

TASK = Path(__file__).parent / "small_task.py"
LAYOUT = "hybrid(groups={}, min_weights=500{})"


def trained(out, layout=None, task="without_dropout", **settings) -> tuple[RunData, contents.Parameters]:
    given = {"workers": 4, "epochs": 2, "algorithm": "all-reduce", "optimizer": "adamw", "learning_rate": 0.01}
    given |= {"backend": "threads"}
    config = pl.TrainConfig(task=f"{TASK}:{task}", layout=layout, **{**given, **settings})
    run = pl.train(config, out=out)
    return run, contents.load_parameters(files.newest(out / "checkpoint"))


@pytest.mark.parametrize(("groups", "more"), [(1, ""), (2, ", pairing=column-row"), (4, "")])
def test_parameters_and_figures_are_those_of_plain_all_reduce(groups, more, tmp_path):
    plain, expected = trained(tmp_path / "plain")
    run, found = trained(tmp_path / "cut", LAYOUT.format(groups, more))
    torch.testing.assert_close(found.x, expected.x, rtol=0, atol=1e-12)
    assert (
        found.version == expected.version == 8
    )  # 13 batches among 4 workers: in the last round of an epoch, three have none
    assert run.result["test_accuracy"] == plain.result["test_accuracy"]
    assert run.result["samples"] == plain.result["samples"] == 104


def test_dropout_does_not_depend_on_groups(tmp_path):
    first, *others = [
        trained(tmp_path / str(g), LAYOUT.format(g, ""), "with_dropout", epochs=1)[1].x for g in (4, 2, 1)
    ]
    for other in others:
        torch.testing.assert_close(other, first, rtol=0, atol=1e-12)


def test_a_resumed_run_ends_like_one_that_was_not_stopped(tmp_path):
    whole, expected = trained(tmp_path / "whole", LAYOUT.format(2, ""), "with_dropout", epochs=2)
    trained(tmp_path / "part", LAYOUT.format(2, ""), "with_dropout", epochs=1)
    config = pl.TrainConfig(
        task=f"{TASK}:with_dropout", workers=4, epochs=2, algorithm="all-reduce", optimizer="adamw", learning_rate=0.01,
        backend="threads", layout=LAYOUT.format(2, ""),
    )  # fmt: skip
    run = pl.train(config, resume=tmp_path / "part")
    found = contents.load_parameters(files.newest(tmp_path / "part" / "checkpoint"))
    assert found.version == expected.version
    torch.testing.assert_close(found.x, expected.x, rtol=0, atol=1e-12)
    assert run.result["test_accuracy"] == whole.result["test_accuracy"]
    with pytest.raises(pl.UsageError, match="cannot be resumed with none"):
        pl.train(dataclasses.replace(config, layout=None), resume=tmp_path / "part")


@pytest.mark.parametrize("groups", [1, 2])
def test_a_runs_bytes_are_the_plans(groups, tmp_path):
    run, _ = trained(tmp_path / "run", LAYOUT.format(groups, ""), steps=3, epochs=None)
    model = small_vgg()
    part = WorkerPart(layout_of(LAYOUT.format(groups, "")), model, 0, 4, seed=0)
    plan, sharding = part.plan, part.sharding
    alike = 2 * 3 / 4 * sharding.first_cut * 8
    shards = 2 * (groups - 1) / groups * (sharding.num_local - sharding.first_cut) * 8
    numbers_of_rows = 3 * 8
    expected = plan.group_bytes(rows=4, element_bytes=8) + alike + shards + numbers_of_rows
    for records in run.records.values():
        assert records["sent_bytes"].tolist() == pytest.approx([expected] * 3, abs=20)  # each operation's are rounded
