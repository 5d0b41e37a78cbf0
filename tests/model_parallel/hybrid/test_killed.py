"""`kill -9` of a worker under a layout: the run names it, and `--resume` ends as a run does that nobody has killed."""

import json

import pytest
import torch

import forked
import paceline as pl
from model_parallel.hybrid.test_train import LAYOUT, TASK, trained
from paceline.memory.failpoints import ENVIRONMENT_VARIABLE
from paceline.records import checkpoint_contents as contents
from paceline.records import checkpoint_files as files

EPOCHS, ROUNDS = 4, 4  # 13 batches among 4 workers: in the last round of an epoch, three have none


@pytest.mark.parametrize("more", ["", ", pairing=column-row"])
def test_a_run_goes_on_after_a_kill_as_if_there_had_been_none(more, tmp_path, monkeypatch, nothing_left):
    layout, folder = LAYOUT.format(2, more), tmp_path / "killed"
    whole, expected = trained(tmp_path / "whole", layout, "with_dropout", epochs=EPOCHS)
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, f"replicated.mid_write@3#{2 * ROUNDS + 2}")
    config = pl.TrainConfig(
        task=f"{TASK}:with_dropout", workers=4, epochs=EPOCHS, algorithm="all-reduce", optimizer="adamw",
        learning_rate=0.01, layout=layout, checkpoint_every_s=0,
    )  # fmt: skip
    killed = pl.train(config, out=folder)
    assert killed.result["outcome"] == "crashed"
    assert killed.result["workers_lost"] == [3]
    assert "Worker 3 was ended by signal 9" in killed.result["outcome_reason"]
    assert "--resume" in killed.result["outcome_reason"]
    saved = contents.load_parameters(files.newest(folder / "checkpoint"))
    assert saved.version in (ROUNDS, 2 * ROUNDS), "the beginning of an epoch that all four have saved"
    monkeypatch.delenv(ENVIRONMENT_VARIABLE)
    resumed = forked.run(["-m", "paceline", "train", "--resume", folder, "--json"])
    assert resumed.returncode == 0, resumed.stderr
    found = contents.load_parameters(files.newest(folder / "checkpoint"))
    assert found.version == expected.version == EPOCHS * ROUNDS
    torch.testing.assert_close(found.x, expected.x, rtol=0, atol=1e-12)
    assert json.loads((folder / "result.json").read_text())["test_accuracy"] == whole.result["test_accuracy"]
