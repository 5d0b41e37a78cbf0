"""`paceline advise FILE.py:train`: what is asked of the engine, and how its answer looks; the engine is a stand-in."""

import json
import math
import sys
import types
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.advice.answer import Circumstances, Target, as_json
from paceline.advice.words import name, verdict
from paceline.cli.advise_training import per_second, seconds
from paceline.cli.app import app
from paceline.errors import UsageError
from paceline.observe.words import few
from paceline.planner.estimate import Estimate

from .made_up import INTERVALS, SPECS, made_up


@pytest.fixture
def engine(monkeypatch, tmp_path):
    """What it was asked for in `asked`, what it answers in `answers`."""
    seen = types.SimpleNamespace(asked=None, answers=made_up())

    def advise(program, **given):
        seen.asked = types.SimpleNamespace(program=program, **given)
        for share, what in ((0.0, "measuring leashed"), (0.2, "measuring leashed"), (0.5, "simulating")):
            given["on_progress"](what, share)
        return seen.answers

    monkeypatch.setitem(sys.modules, "paceline.advice.advise", types.SimpleNamespace(advise=advise))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return seen


def advised(*arguments):
    result = CliRunner().invoke(app, ["advise", *map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


def test_the_ranking_is_shown_with_its_reasons_and_the_command(engine):
    code, out, error = advised("train.py:train", "--target-accuracy", "0.96")
    assert code == 0, error
    assert max(map(len, out.splitlines()[:40])) <= 80
    lines = out.splitlines()
    first, second = (
        lines.index(next(line for line in lines if line.startswith(name))) for name in ("leashed ", "hogwild ")
    )
    assert first < second
    best = engine.answers.ranked[0]
    assert lines[first].split() == ["leashed", "4", "3.96", "1.00", "120,000", "30,314", "4.04", "3.0"]
    assert lines[first + 1].split() == ["3.17", "to", "4.95", "4.35"]  # the interval, and what is modelled
    assert best.time_s.low == pytest.approx(INTERVALS[0] * 3.96, rel=0.01)
    said = " ".join(out.split())
    assert "Take leashed with 4 workers: a test accuracy of 96 % after 3.96 s (90 % interval 3.17 s to 4.95 s)." in said
    for sentence in (*engine.answers.reasons, *engine.answers.warnings):
        assert sentence in said
    beyond = [one for one in engine.answers.ranked if one.candidate.workers == 4 and one.time_s]
    assert "Not tried: d-psgd: it needs 3 workers" in said
    assert f"{few([name(one.candidate) for one in beyond])}: more workers than the 2 that were measured." in said
    assert "parameter-server(mode=sync(backups=1)) with 4 workers: diverged in 2 of 2 simulations; more workers" in said
    assert "leashed 1.12 1.05 8.0 %" in said
    assert f"Start it: {engine.answers.command}\n" in out
    assert "  0 %  measuring leashed\n 50 %  simulating\n" in error


def test_every_option_reaches_the_engine(engine, tmp_path):
    (tmp_path / "here.toml").write_text("workers = 8\n")
    words = (
        "train.py:train --target-loss 0.1 --deadline 5m --cluster here.toml --slow 0:4 --slow 5:2 --kill-rate 2/h"
        " --algorithm leashed(persistence=2),hogwild --algorithm locked --budget 90s --seed 3 --data . --out there"
    )
    code, _, error = advised(*words.split())
    assert code == 0, error
    asked = engine.asked
    assert asked.target == Target(loss=0.1, deadline_s=300.0)
    assert asked.circumstances == Circumstances(slow={0: 4.0, 5: 2.0}, kills_per_s=2 / 3600, cluster="here.toml")
    assert (asked.program, asked.max_workers, asked.budget_s, asked.seed) == ("train.py:train", 8, 90.0, 3)
    assert asked.algorithms == ["leashed(persistence=2)", "hogwild", "locked"]
    assert asked.data == Path()
    assert sorted(path.name for path in (tmp_path / "there").iterdir()) == ["advice.html", "advice.json"]


def test_options_may_come_first_and_workers_are_at_least_two(engine, monkeypatch):
    monkeypatch.setattr("paceline.cli.advise_training.num_cores", lambda: 1)
    assert advised("--target-loss", "0.1", "train.py:train")[0] == 0
    assert (engine.asked.max_workers, engine.asked.algorithms, engine.asked.budget_s) == (2, None, 300.0)
    assert engine.asked.circumstances == Circumstances()


@pytest.mark.parametrize("arrive", [True, False])
def test_json_says_the_same_without_tokens_that_json_does_not_have(engine, tmp_path, arrive):
    engine.answers = made_up(Target(loss=0.1, deadline_s=3.0), arrive=arrive)
    code, out, error = advised("train.py:train", "--target-loss", "0.1", "--json", "--out", "there")
    said = json.loads(out, parse_constant=pytest.fail)
    assert "\N{HORIZONTAL ELLIPSIS}" not in error, "the table for people, on stderr, is not cut at 80 columns"
    assert "loss at" in error
    assert said == json.loads((tmp_path / "there" / "advice.json").read_text(), parse_constant=pytest.fail)
    assert said == json.loads(json.dumps(as_json(engine.answers)))
    assert len(said["ranked"]) == len(SPECS) * 3
    assert max(map(len, error.splitlines()[: 2 * 14 + 5])) <= 80, "what people read is on stderr, and not cut"
    assert "\N{HORIZONTAL ELLIPSIS}" not in error
    first, last = said["ranked"][0], said["ranked"][-1]
    assert said["best"] == {
        "algorithm": first["algorithm"],
        "workers": first["workers"],
    }  # with a deadline, all have a loss
    assert first["train_loss_at_deadline"]["low"] == engine.answers.ranked[0].at_deadline.low
    assert first["samples_per_s"]["value"] == engine.answers.ranked[0].samples_per_s.value
    assert (last["time_s"], last["simulated_s"]) == (None, [None, None])
    assert (first["time_s"] is None) != arrive
    assert code == 0, error


def test_an_interval_that_is_open_above_is_said_and_null_in_json(engine):
    from dataclasses import replace

    from .made_up import about

    best, *others = engine.answers.ranked
    open_above = about(best.time_s.value, high=float("inf"))
    engine.answers = replace(engine.answers, ranked=(replace(best, time_s=open_above), *others))
    code, out, _ = advised("train.py:train", "--target-accuracy", "0.96")
    assert code == 0
    assert "3.17 or more" in out
    assert "(90 % interval 3.17 s or more)" in " ".join(out.split())
    assert as_json(engine.answers)["ranked"][0]["time_s"]["high"] is None


def test_what_nobody_knows_is_a_dash(engine, tmp_path):
    from dataclasses import replace

    unknown = Estimate(value=math.nan, low=math.nan, high=math.nan)
    endless = Estimate(value=12.0, low=0.0, high=math.inf)
    best, *others = made_up(Target(loss=0.1, deadline_s=3.0)).ranked
    first = replace(
        best, samples_per_s=unknown, samples_to_target=endless, modelled_s=endless, at_deadline=endless, curve=(),
        simulated_s=(math.inf, 4.0), time_s=endless,
    )  # fmt: skip
    engine.answers = replace(engine.answers, target=Target(loss=0.1, deadline_s=3.0), ranked=(first, *others), fits=())
    code, out, error = advised("train.py:train", "--target-loss", "0.1", "--deadline", "3", "--out", "there")
    assert code == 0, error
    row = next(line for line in out.splitlines() if line.startswith("leashed "))
    assert row.split() == ["leashed", "4", "12.0", "12.0", "\N{EN DASH}", "never", "3.0"]
    json.loads((tmp_path / "there" / "advice.json").read_text(), parse_constant=pytest.fail)


def test_where_nothing_arrives_the_table_is_still_shown_and_one_sentence_says_so(engine):
    engine.answers = made_up(arrive=False)
    code, out, error = advised("train.py:train", "--target-accuracy", "0.96")
    assert code == 1
    assert "not reached" in out
    assert "Start it" not in out
    why = "None of 21 candidates is expected to reach a test accuracy of 96 %: all of them diverged."
    assert error.splitlines()[-1] == f"paceline: {why}"
    assert verdict(engine.answers) == why


TARGET = "--target-accuracy 0.96"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("train.py:train", "Give a target: --target-accuracy 0.96, or --target-loss 0.1."),
        ("train.py:train --target-loss 1 --target-accuracy 0.5", "exclude each other"),
        ("train.py:train --target-accuracy 96", "write 0.95 for 95 %"),
        ("train.py:train --target-loss -1", "--target-loss must be above 0, not -1."),
        (
            f"train.py:train {TARGET} --deadline soon",
            "--deadline must be a duration above 0, such as 90, 90s, 5m or 2h, not 'soon'",
        ),
        (f"train.py:train {TARGET} --deadline 0", "--deadline must be a duration above 0"),
        (f"train.py:train {TARGET} --budget 5y", "--budget must be a duration"),
        (f"train.py:train {TARGET} --kill-rate 1", "--kill-rate must be a rate, such as 1/h, 2/d or 0.5/min, not '1'"),
        (f"train.py:train {TARGET} --kill-rate=-1/h", "--kill-rate must be a rate"),
        (f"train.py:train {TARGET} --max-workers 0", "--max-workers must be 1 or more, not 0"),
        (
            f"train.py:train {TARGET} --max-workers 2 --slow 2:4",
            "Worker 2 cannot be slow: the 2 workers are numbered from 0 to 1.",
        ),
        (f"train.py:train {TARGET} --slow 2", "--slow must be WORKER:FACTOR, as 0:100, not '2'."),
        (f"train.py:train {TARGET} --cluster missing.toml", "missing.toml does not exist"),
        (f"train.py:train {TARGET} --algorithm hogwildd", "Did you mean 'hogwild'?"),
        (f"train.py:train {TARGET} --seed -1", "--seed must be 0 or more"),
        (f"train.py:train {TARGET} --data missing", "--data missing is not a folder"),
        (f"train.py:train {TARGET} --out full", "--out full is not empty"),
        ("layrs --workers 3", "No such option: --workers"),
        (f"layrs {TARGET}", "neither a program nor a kind of advice. Did you mean 'layers'? Write FILE.py:FUNCTION"),
    ],
)
def test_refused(engine, tmp_path, words, says):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("")
    code, out, error = advised(*words.split())
    assert (code, out, engine.asked) == (2, "", None)
    if "No such" not in says:  # click's own words, which the installed command makes one line of
        assert error.startswith("paceline: ")
        assert error.count("\n") == 1
        assert says in error


@pytest.mark.parametrize(
    ("text", "value"),
    [("90", 90), ("90s", 90), ("1.5m", 90), ("5min", 300), ("2 h", 7200), ("1d", 86400), ("20ms", 0.02)],
)
def test_durations(text, value):
    assert seconds(text, "--x") == pytest.approx(value)


@pytest.mark.parametrize(
    ("text", "value"), [("1/h", 1 / 3600), ("2/d", 2 / 86400), ("0.5/min", 0.5 / 60), ("3/s", 3), ("0", 0)]
)
def test_rates(text, value):
    assert per_second(text, "--x") == pytest.approx(value)


@pytest.mark.parametrize("text", ["inf", "nan", "1e999", "-5", "", "s", "1/h"])
def test_what_is_no_duration(text):
    with pytest.raises(UsageError, match="--x must be a duration"):
        seconds(text, "--x")


@pytest.mark.parametrize("text", ["nan/h", "inf/s", "/h", "1/", "1/y", "h", ""])
def test_what_is_no_rate(text):
    with pytest.raises(UsageError, match="--x must be a rate"):
        per_second(text, "--x")


def test_help_fits_a_screen_and_teaches(engine, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERMINAL_WIDTH", "100")
    for words in ([], ["--help"]):
        code, out, _ = advised(*words)
        assert code == 0
        assert "Usage: paceline advise [OPTIONS]" in out.replace("root", "paceline")
        assert "paceline advise train.py:train --target-accuracy 0.96" in out
        assert len(out.splitlines()) <= 48
