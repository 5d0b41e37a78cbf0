"""Curves of runs, read back with TensorBoard's own reader."""

import builtins

import pytest
from typer.testing import CliRunner

import paceline as pl
from paceline.cli.app import app
from paceline.integrations.tensorboard import TensorBoard
from paceline.observe.progress import Progress, WorkerProgress

accumulators = pytest.importorskip(
    "tensorboard.backend.event_processing.event_accumulator",
    reason="needs the extra: pip install 'paceline[tensorboard]'",
)
pytestmark = pytest.mark.filterwarnings("default")


def read(folder):
    """(samples, value) of each curve; the texts are named."""
    found = accumulators.EventAccumulator(str(folder)).Reload()
    curves = {name: [(one.step, one.value) for one in found.Scalars(name)] for name in sorted(found.Tags()["scalars"])}
    return curves, found.Tags()["tensors"]


def test_a_run_of_the_command_line_has_its_curves_in_its_folder(tmp_path):
    told = CliRunner().invoke(
        app, ["train", "--algorithm", "hogwild", "--epochs", "3", "--tensorboard", "--out", str(tmp_path / "one")]
    )
    assert told.exit_code == 0, told.output
    result = pl.RunData.load(tmp_path / "one").result
    curves, _ = read(tmp_path / "one" / "tensorboard")
    assert {"accuracy/test", "loss/train", "run/samples per second", "run/updates", "run/workers"} <= set(curves)
    samples, loss = curves["loss/train"][-1]
    assert samples == result["samples"]
    assert loss == pytest.approx(result["train_loss"])
    assert curves["accuracy/test"][-1] == (samples, pytest.approx(result["test_accuracy"]))


def test_curves_are_there_while_the_run_goes_on(tmp_path):
    clock = iter(range(100))
    workers = WorkerProgress(0, mean_staleness=1.0), WorkerProgress(1, mean_staleness=3.0, waiting_share=0.5)
    with TensorBoard(tmp_path / "board", now_s=lambda: next(clock)) as board:
        assert not (tmp_path / "board").exists()
        board.update(Progress(elapsed_s=1, samples=64, loss=2.0, workers=workers))
        curves, _ = read(tmp_path / "board")
        assert curves["loss/train"] == [(64, 2.0)]
        assert curves["staleness/mean"] == [(64, 2.0)]
        assert curves["waiting/share of time"] == [(64, 0.5)]
        assert "accuracy/test" not in curves
        lost = WorkerProgress(1, alive=False)
        board.update(Progress(elapsed_s=2, samples=128, loss=float("nan"), workers=(workers[0], lost), message="Lost."))
    curves, texts = read(tmp_path / "board")
    assert curves["loss/train"] == [(64, 2.0)]
    assert curves["run/workers"][-1] == (128, 1.0)
    assert texts == ["messages/text_summary"]


def test_without_the_package_the_extra_is_named_before_anything_is_written(monkeypatch, tmp_path):
    imported = builtins.__import__

    def without(name, *others, **more):
        if name == "torch.utils.tensorboard":
            raise ImportError(name)
        return imported(name, *others, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(pl.UsageError, match=r"pip install 'paceline\[tensorboard\]'"):
        TensorBoard(tmp_path)
    told = CliRunner().invoke(app, ["train", "--tensorboard", "--out", str(tmp_path / "one")])
    assert told.exit_code == 2
    assert not (tmp_path / "one").exists()
