import dataclasses
import json
from pathlib import Path

import pytest

from paceline.specs.goal import Goal
from rewritten import write_checked


def test_what_the_options_mean(run, training, tmp_path):
    words = (
        "--task digits-mlp --algorithm hogwild(copy=true) --workers 3 --steps 7 --batch-size 4 --learning-rate 0.5 "
        "--momentum 0.9 --optimizer sgd(nesterov=true) --optimizer-state shared --target-loss 0.1 --partition fixed "
        "--placement first-touch --backend threads --restarts 2 --min-workers 2 --seed 5 --data . --out here"
    )
    result = run("train", *words.split())
    assert result.exit_code == 0, result.output
    (call,) = training.trained
    config = call.config
    assert (config.algorithm, config.workers, config.steps, config.epochs) == ("hogwild(copy=true)", 3, 7, None)
    assert (config.batch_size, config.learning_rate, config.momentum) == (4, 0.5, 0.9)
    assert (config.optimizer, config.optimizer_state) == ("sgd(nesterov=true)", "shared")
    assert (config.target_loss, config.partition, config.backend) == (0.1, "fixed", "threads")
    assert (config.restarts, config.min_workers, config.seed, str(config.data), str(call.out)) == (2, 2, 5, ".", "here")


def test_results_go_to_stdout_and_the_rest_to_stderr(run, training):
    result = run("train", "--out", "here")
    assert "TABLE of hogwild" in result.stdout
    assert "here/report.html" in result.stdout
    assert "here/trace.json" in result.stdout
    assert "digits-mlp: hogwild, 2 workers, into here" in result.stderr


def test_json_is_stdouts_only_line(run, training):
    result = run("train", "--out", "here", "--json")
    assert result.stdout.count("\n") == 1
    assert json.loads(result.stdout) == json.loads(Path("here/result.json").read_text())
    assert "TABLE" in result.stderr


def test_default_folders_differ_and_are_named_after_task_and_algorithm(run, training, tmp_path):
    for _ in range(2):
        run("train", "--algorithm", "hogwild(copy=true)")
    first, second = (call.out for call in training.trained)
    assert first != second
    assert first.match("runs/digits-mlp-hogwild-*")


@pytest.mark.parametrize(
    ("outcome", "code", "shown"),
    [("converged", 0, "TABLE"), ("diverged", 0, "loss is not finite at step 412"), ("crashed", 1, "Crashed")],
)
def test_outcomes(run, training, outcome, code, shown):
    training.outcomes["hogwild"] = outcome
    result = run("train")
    assert result.exit_code == code
    assert shown in result.stdout


def test_resume_takes_the_runs_configuration_and_what_is_given_now(run, training, tmp_path):
    old = tmp_path / "old"
    (old / "checkpoint").mkdir(parents=True)
    write_checked(old / "config.json", {"workers": 4, "epochs": 3.0, "seed": 9, "of a newer version": 1})
    assert run("train", "--resume", old, "--steps", "100").exit_code == 0
    (call,) = training.trained
    assert (call.config.workers, call.config.seed, call.config.steps, call.config.epochs) == (4, 9, 100, None)
    assert (call.out, call.resume) == (old, old)
    (old / "config.json").write_text("{")
    assert "config.json is damaged" in run("train", "--resume", old).stderr


def test_a_launched_run_is_resumed_by_launch(run, training, tmp_path):
    (tmp_path / "mine" / "checkpoint").mkdir(parents=True)
    config = {"task": "train", "workers": 2, **dataclasses.asdict(Goal())}
    write_checked(tmp_path / "mine" / "config.json", config)
    result = run("train", "--resume", "mine")
    assert (result.exit_code, training.trained) == (2, [])
    assert "is a run of a function: resume it with `paceline launch FILE.py:FUNCTION --resume mine`" in result.stderr


def test_interrupted(run, training, tmp_path):
    training.raises["hogwild"] = KeyboardInterrupt()
    result = run("train")
    assert result.exit_code == 130
    assert result.stderr.endswith("paceline: Stopped.\n")
    (tmp_path / "here" / "checkpoint").mkdir(parents=True)
    write_checked(tmp_path / "here" / "config.json", {})
    assert "paceline train --resume here" in run("train", "--resume", "here").stderr
