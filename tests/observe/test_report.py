import json
import re

import numpy as np
import pytest

from paceline.observe.figures import figures
from paceline.observe.palette import METHODS as METHOD_COLOURS
from paceline.observe.palette import tokens
from paceline.observe.report import write_report
from paceline.records.run_data import RunData

from .synthetic import METHODS, empty, make_run

BARE = RunData(config={"algorithm": "hogwild"}, result={"outcome": "crashed", "outcome_reason": "worker 1 was killed"})


def without_plotly(path):
    return re.sub(r"<script>/\*.*?</script>", "", path.read_text(), flags=re.DOTALL)


def test_a_report_of_one_run_says_what_came_out(tmp_path):
    run = make_run(slow=1)
    page = without_plotly(
        write_report([run], tmp_path / "report.html", title="one", command="paceline train digits-mlp")
    )
    assert "leashed(persistence=0) with 4 workers reached the target loss of 0.4" in page
    assert page.count("<figure ") == 6
    assert "paceline train digits-mlp" in page
    assert "2.13.0" in page
    assert "learning_rate" in page


def test_a_report_asks_nothing_of_the_network(tmp_path, plotly):
    page = write_report([make_run(steps=30)], tmp_path / "report.html", title="runs", command="").read_text()
    assert "default-src 'none'" in page
    assert not re.search(r"<(script|link|img|iframe)[^>]*\s(src|href)=", without_plotly(tmp_path / "report.html"))
    assert page.count("</script>") == 4


def test_user_text_is_escaped_everywhere(tmp_path):
    text = "</script><script>bad()</script>\"'&"
    run = make_run(text, steps=30)
    run.config[text] = text
    run.result |= {"outcome": text, "outcome_reason": text, "workers_lost": [text], "versions": {text: text}}
    page = without_plotly(write_report([run, make_run()], tmp_path / "report.html", title=text, command=text))
    assert "<script>bad" not in page
    embedded = re.search(r'id="figures">(.*?)</script>', page, re.DOTALL)
    assert embedded
    assert any(trace["name"] == text for figure in json.loads(embedded[1]) for trace in figure["traces"])


@pytest.mark.parametrize("runs", [[BARE], [BARE, make_run(steps=30)], [RunData()], [RunData(records={0: empty()})]])
def test_missing_figures_are_tolerated(tmp_path, runs):
    page = without_plotly(write_report(runs, tmp_path / "report.html", title="runs", command=""))
    assert "Settings, versions and machine" in page
    if runs[0] is BARE:
        assert "worker 1 was killed" in page
    assert "How to repeat it" not in page, "no heading without a command"


def test_a_diverged_run_is_shown_with_its_reason_and_does_not_flatten_the_others(tmp_path):
    runs = [make_run(), make_run("hogwild", diverged_at=200)]
    page = without_plotly(write_report(runs, tmp_path / "report.html", title="runs", command=""))
    assert "diverged<small>the loss became non-finite</small>" in page
    loss = figures(runs)[0]
    low, high = loss.layout["yaxis"]["range"]
    assert 10**high < 10
    assert low < np.log10(0.2)
    assert "Diverged runs leave the figure" in loss.note


def test_figures_are_json_and_bounded_for_long_runs():
    run = make_run(steps=400, workers=2)
    run.records = {worker: np.concatenate([own] * 20) for worker, own in run.records.items()}
    text = json.dumps([figure.traces for figure in figures([run])], allow_nan=False)
    assert len(text) < 400_000


def test_colours_of_a_method_are_the_same_in_every_figure():
    shown = figures([make_run(method, seed=seed, steps=60) for method in METHODS for seed in (0, 1)])
    colours = {}
    for figure in shown[:4]:
        for trace in figure.traces:
            method = trace["name"].split(" · ")[0]
            colours.setdefault(method, set()).add(trace["marker"]["color"])
    assert all(len(found) == 1 for found in colours.values())
    assert len({next(iter(found)) for found in colours.values()}) == len(METHODS)


def luminance(colour):
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [one / 12.92 if one <= 0.03928 else ((one + 0.055) / 1.055) ** 2.4 for one in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colours_are_legible(theme):
    named = tokens(theme)

    def contrast(colour):
        high, low = sorted([luminance(colour), luminance(named["@page"])], reverse=True)
        return (high + 0.05) / (low + 0.05)

    assert all(contrast(colour) >= 3 for colour in METHOD_COLOURS[theme])  # lines: WCAG 1.4.11
    assert contrast(named["@text"]) >= 7
    assert contrast(named["@soft"]) >= 4.5
