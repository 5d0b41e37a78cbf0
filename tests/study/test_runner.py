"""Trials are run once, whatever happens; what goes wrong in one is its result; the table has them all."""

import json
import math
import sys
import types

import pandas
import pytest

from paceline.errors import UsageError
from paceline.study import runner
from paceline.study.design import plan_trials
from paceline.study.folder import StudyFolder
from paceline.study.parts import Range
from paceline.study.runner import run_study
from paceline.study.study_file import Design, Limits
from paceline.study.table import load_table

BROKEN = """
import torch
from paceline.tasks.digits_mlp import digits_mlp
import dataclasses

def loss(output, target):
    if len(output) == 8:
        raise RuntimeError("eight is too few")
    return torch.nn.functional.cross_entropy(output, target)

def broken():
    return dataclasses.replace(digits_mlp(), loss=loss)
"""


@pytest.fixture
def ran(monkeypatch):
    """Names of the trials that were really run."""
    names = []
    original = runner._run

    def counted(trial):
        names.append(trial.hash)
        return original(trial)

    monkeypatch.setattr(runner, "_run", counted)
    return names


def test_running_again_runs_nothing(timed, tmp_path, ran):
    study, said = timed(), []
    end = run_study(study, tmp_path, on_progress=said.append)
    assert (end.ran, end.found, end.left_out, dict(end.outcomes)) == (8, 0, [], {"stopped": 8})
    assert sorted(ran) == sorted(trial.hash for trial in plan_trials(study).trials)
    assert ran == [trial.hash for trial in plan_trials(study).trials]  # in this order
    assert said[-1].done == said[-1].total == 8
    assert said[-1].remaining_s == 0
    before = load_table(tmp_path)
    end = run_study(study, tmp_path)
    assert (end.ran, end.found, len(ran)) == (0, 8, 8)
    pandas.testing.assert_frame_equal(load_table(tmp_path), before)


def test_a_changed_study_runs_what_is_new_and_leaves_out_what_it_has_no_more(timed, tmp_path, ran):
    run_study(timed(), tmp_path)
    wider = timed(factors={"algorithm": ("leashed", "locked"), "workers": (1, 2)})
    end = run_study(wider, tmp_path)
    assert (end.ran, end.found, len(end.left_out)) == (4, 4, 4)
    table = load_table(tmp_path)
    assert sorted(table["factor.algorithm"].unique()) == ["leashed", "locked"]
    assert list(table["number"]) == list(range(8))
    run_study(timed(), tmp_path)  # and back: nothing was thrown away
    assert len(ran) == 12


def test_levels_of_more_than_64_bits_are_numbers_of_the_table(timed, tmp_path):
    run_study(timed(factors={"learning_rate": (10**20, 10**21)}), tmp_path)
    assert list(load_table(tmp_path)["factor.learning_rate"].unique()) == [1e20, 1e21]


@pytest.fixture(scope="module")
def trained_table(trained, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    run_study(trained(), folder)
    return load_table(folder)


def test_trials_from_another_machine_are_said_to_be(timed, tmp_path):
    run_study(timed(), tmp_path)
    path = next((tmp_path / "trials").glob("*/trial.json"))
    trial = json.loads(path.read_text())
    trial["environment"]["machine"]["processor"] = "abacus"
    path.write_text(json.dumps(trial))
    path.with_name("SHA256SUMS").unlink()
    (note,) = run_study(timed(), tmp_path).notes
    assert "1 earlier trial ran" in note
    assert (load_table(tmp_path)["environment.processor"] == "abacus").sum() == 1


def test_methods_with_one_seed_begin_alike(trained_table):
    assert list(trained_table.groupby("factor.seed")["initial_loss"].nunique()) == [1, 1]
    assert trained_table["initial_loss"].nunique() == 2


def test_a_trial_ends_at_its_target_and_later_targets_are_censored(trained_table):
    table = trained_table
    assert set(table["outcome"]) == {"converged"}
    assert (table["time_to_90_s"] < table["time_to_75_s"]).all()
    assert (table["time_to_75_s"] <= table["wall_s"]).all()
    assert (table["steps_to_75"] <= table["steps"]).all()
    assert table["time_to_1_s"].isna().all()
    assert (table["steps"] < 6 * 1437 / 32).all()  # it did stop there


def test_a_trial_goes_on_where_it_should_and_a_target_added_later_is_read_from_its_records(trained, tmp_path, ran):
    run_study(trained(stop_at_target=False), tmp_path)
    on = load_table(tmp_path)
    assert (on["samples"] == 6 * 1437).all()
    assert set(on["outcome"]) == {"converged"}
    assert (on["train_loss"] < 0.75 * on["initial_loss"]).all()

    run_study(trained(stop_at_target=False, targets=(80.0, 75.0)), tmp_path)
    table = load_table(tmp_path)
    assert len(ran) == 4
    assert (table["time_to_80_s"] <= table["time_to_75_s"]).all()
    assert "time_to_1_s" not in table


def test_virtual_seconds_limit_a_trial(timed, tmp_path):
    study = timed(limits=Limits(steps=1000, seconds=0.055), factors={"algorithm": ("hogwild",)}, seeds=(0,))
    run_study(study, tmp_path)
    row = load_table(tmp_path).iloc[0]
    assert row["wall_s"] <= 0.055
    assert row["steps"] == 2 * 5  # 0.01 s each
    assert row["outcome"] == "stopped"


def test_a_divergence_is_a_result_with_reason_and_step(trained, tmp_path):
    end = run_study(
        trained(settings={"workers": 2, "learning_rate": 1e30}, factors={"algorithm": ("locked",)}), tmp_path
    )
    assert end.outcomes == {"diverged": 2}
    table = load_table(tmp_path)
    assert table["reason"].str.contains("The loss became nan at step").all()
    assert (table["failed_step"] >= 1).all()
    assert table["time_to_75_s"].isna().all()


def test_a_crash_is_a_result_and_does_not_end_the_study(trained, tmp_path):
    (tmp_path / "broken.py").write_text(BROKEN)
    study = trained(
        task=f"{tmp_path}/broken.py:broken",
        factors={"batch_size": (8, 32)},
        settings={"workers": 2},
        seeds=(0,),
        limits=Limits(steps=3),
    )
    end = run_study(study, tmp_path / "out")
    assert end.outcomes == {"crashed": 1, "stopped": 1}
    crashed = load_table(tmp_path / "out").set_index("factor.batch_size").loc[8]
    assert crashed["outcome"] == "crashed"
    assert "eight is too few" in crashed["reason"]
    trial = json.loads((tmp_path / "out" / "trials" / crashed["trial"] / "trial.json").read_text())
    assert (trial["outcome"], trial["factors"]["batch_size"]) == ("crashed", 8)
    before = plan_trials(study).trials[0].hash
    (tmp_path / "broken.py").write_text(BROKEN + "# changed\n")
    assert plan_trials(study).trials[0].hash != before  # another task


def test_ctrl_c_is_no_result_even_if_something_fails_on_the_way_out(timed, tmp_path, monkeypatch):
    def simulate(*arguments, **named):
        try:
            raise KeyboardInterrupt
        finally:
            raise AssertionError("can only join a started process")

    with monkeypatch.context() as patched:
        patched.setattr(runner, "simulate_task", simulate)
        with pytest.raises(KeyboardInterrupt):
            run_study(timed(), tmp_path)
    assert len(load_table(tmp_path)) == 0
    assert run_study(timed(), tmp_path).outcomes == {"stopped": 8}


def test_half_a_trial_is_removed(timed, tmp_path):
    half = tmp_path / "trials" / ".unfinished-0123456789abcdef"
    half.mkdir(parents=True)
    (half / "config.json").write_text("{")
    (tmp_path / "study.toml").write_text("")
    run_study(timed(), tmp_path)
    assert not half.exists()


def test_a_folder_is_held_by_one(timed, tmp_path):
    from paceline.study.folder import StudyFolder

    with StudyFolder(tmp_path / "held").held(), pytest.raises(UsageError, match="is in use by process"):
        run_study(timed(), tmp_path / "held")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(UsageError, match="contains no study"):
        run_study(timed(), tmp_path / "mine")


def test_missing_data_are_missed_before_the_first_trial(trained, tmp_path, ran):
    with pytest.raises(UsageError):
        run_study(trained(task="mnist-mlp", data=tmp_path), tmp_path / "out")
    assert not ran
    assert not (tmp_path / "out").exists()


def test_the_table_is_flat_and_the_same_in_every_form(trained, tmp_path):
    run_study(trained(factors={"algorithm": ("hogwild", "leashed"), "algorithm.persistence": ("none", 0)}), tmp_path)
    table = load_table(tmp_path)
    assert len(table) == 6
    assert table["trial"].is_unique
    persistence = table[table["factor.algorithm"] == "hogwild"]["factor.algorithm.persistence"]
    assert persistence.isna().all()
    for column in (
        "staleness_mean",
        "staleness_p90",
        "waiting_share",
        "gradient_s_median",
        "apply_s_median",
        "lock_wait_s",
    ):
        assert pandas.api.types.is_float_dtype(table[column]) or pandas.api.types.is_integer_dtype(table[column]), (
            column
        )
        assert table[column].notna().all(), column
    histogram = {int(key): count for key, count in json.loads(table["staleness_histogram"][0]).items()}
    mean = sum(key * count for key, count in histogram.items()) / sum(histogram.values())
    assert math.isclose(mean, table["staleness_mean"][0])
    assert table["environment.paceline"].nunique() == 1
    pandas.testing.assert_frame_equal(pandas.read_parquet(tmp_path / "table.parquet"), table)
    (tmp_path / "alone").mkdir()
    (tmp_path / "table.csv").rename(tmp_path / "alone" / "table.csv")
    alone = load_table(tmp_path / "alone")
    assert list(alone.columns) == list(table.columns)
    assert list(alone["trial"]) == list(table["trial"])
    with pytest.raises(UsageError, match="holds no study"):
        load_table(tmp_path / "nowhere")


def test_pandas_is_asked_for_before_anything_runs(timed, tmp_path, monkeypatch, ran):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UsageError, match=r"pip install 'paceline\[study\]'"):
        run_study(timed(), tmp_path / "out")
    assert not ran


def test_a_release_of_pyarrow_that_does_not_fit_numpy_is_named(timed, tmp_path, monkeypatch, ran):
    (tmp_path / "pyarrow.py").write_text("raise ImportError('pyarrow requires NumPy 2.0 or newer, found 1.26.4')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "pyarrow", raising=False)
    with pytest.raises(UsageError, match=r"pyarrow, whose import fails \(pyarrow requires NumPy 2.*--upgrade numpy"):
        run_study(timed(), tmp_path / "out")
    assert not ran


class TestOptuna:
    STUDY = types.MappingProxyType(
        {
            "factors": {"workers": (1, 2, 4, 8), "cluster.compute_s": Range(low=0.001, high=0.1, log=True)},
            "design": Design(kind="optuna", trials=5, measure="samples_per_s", goal="maximize"),
        }
    )

    def test_it_is_resumed_with_what_it_has_asked_before(self, timed, tmp_path, ran):
        study = timed(**self.STUDY)
        end = run_study(study, tmp_path / "whole")
        assert (end.ran, len(load_table(tmp_path / "whole"))) == (10, 10)
        whole = list(ran)
        ran.clear()

        def stop(progress):
            if progress.done >= 3:
                raise KeyboardInterrupt

        original, runner._PROGRESS_EVERY_S = runner._PROGRESS_EVERY_S, 0.0
        try:
            with pytest.raises(KeyboardInterrupt):
                run_study(study, tmp_path / "parts", on_progress=stop)
        finally:
            runner._PROGRESS_EVERY_S = original
        assert len(load_table(tmp_path / "parts")) == 3
        end = run_study(study, tmp_path / "parts")
        assert (end.found, end.ran) == (3, 7)
        assert ran == whole

    def test_it_looks_at_the_measure(self, timed, tmp_path):
        study = timed(
            **{**self.STUDY, "design": Design(kind="optuna", trials=14, measure="samples_per_s", goal="maximize")}
        )
        run_study(study, tmp_path)
        rates = load_table(tmp_path)["samples_per_s"].tolist()
        assert sum(rates[14:]) > sum(rates[:14])  # it has learnt where there are more


def test_a_trial_without_its_file_is_named_with_the_remedy(tmp_path):
    (tmp_path / "trials" / "0f").mkdir(parents=True)
    with pytest.raises(UsageError, match=r"0f/trial.json is missing; remove its trial's folder"):
        StudyFolder(tmp_path).trial("0f")
