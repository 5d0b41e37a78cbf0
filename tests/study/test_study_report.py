"""A study's report says the answer first, and has something sensible to say of every kind of study."""

import json
import re

import numpy as np
import pytest

from observe.synthetic import make_run
from paceline.study.report import study_page

from .made_up import make_table

STUDY = """name = "memory"
question = "Does leashed beat locks?"
task = "mnist-mlp"
baseline.algorithm = "locked(kind=mutex)"
"""


def page_of(table, folder, study=STUDY, **options):
    (folder / "study.toml").write_text(study)
    page = study_page(table, folder, **options).read_text()
    return re.sub(r"<script>/\*.*?</script>", "", page, flags=re.DOTALL)


def figures_of(page):
    embedded = re.search(r'id="figures">(.*?)</script>', page, re.DOTALL)
    assert embedded
    return {figure["name"]: figure for figure in json.loads(embedded[1])}


def text_of(page):
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page.partition("<script")[0]).replace("&nbsp;", " "))


def test_the_answer_comes_first_and_the_study_file_last(tmp_path):
    page = page_of(make_table(seeds=6, batch_sizes=(64, 512), noise=0.02), tmp_path)
    text = text_of(page)
    asked, verdict = text.index("Does leashed beat locks?"), text.index("leashed(persistence=1) led: it reached 2.5 %")
    assert asked < verdict < text.index("What to run next") < text.index("Findings") < text.index("All comparisons")
    assert "96 trials" not in text
    assert "144 trials of mnist-mlp: 4 algorithms, workers 1, 2, 4, batch size 64, 512 and 6 seeds each" in text
    assert "baseline.algorithm = " in text[text.index("The study file") :]
    assert "2.13.0" in text[text.index("Versions and machine") :]
    assert list(figures_of(page)) == [
        "time-to-target", "updates-to-target", "arrivals", "efficiency", "speed-up", "staleness", "outcomes", "waiting",
    ]  # fmt: skip


def test_every_figure_has_its_data_and_a_table(tmp_path):
    page = page_of(make_table(seeds=2), tmp_path)
    figures = figures_of(page)
    assert page.count('<details class="as-table">') == len(figures)
    for figure in figures.values():
        heads, *rows = figure["table"]
        assert rows
        assert {len(row) for row in rows} == {len(heads)}
    assert len(figures["time-to-target"]["table"]) == 1 + 36


def test_runs_that_did_not_arrive_are_in_the_boxes(tmp_path):
    table = make_table({"hogwild": 1.0}, workers=(2,), batch_sizes=(512,), seeds=8)
    table.loc[table["factor.seed"] < 3, ["outcome", "time_to_2.5_s"]] = ["diverged", np.nan]
    table["outcome"] = np.where(table["factor.seed"] < 3, "diverged", "converged")
    table["time_to_2.5_s"] = np.where(table["factor.seed"] < 3, np.nan, table["factor.seed"] * 1.0)
    (box,) = figures_of(page_of(table, tmp_path))["time-to-target"]["traces"]
    assert [said.startswith("not arrived: diverged") for said in box["customdata"]] == [True] * 3 + [False] * 5
    assert np.median(box["y"]) == pytest.approx(6.5)  # 3 4 5 6 | 7 and three that never arrived
    assert np.quantile(box["y"], 0.75, method=box["quartilemethod"]) > 7
    assert re.search(r"hogwild 8 5 .* 3 \(13.7 % to 69.4 %\)", text_of((tmp_path / "report.html").read_text()))


@pytest.mark.parametrize(
    ("options", "said", "figures"),
    [
        ({"methods": {"hogwild": 1.4}, "batch_sizes": (64,), "seeds": 6}, "4 workers won: it reached", {"time-to-target"}),
        ({"methods": {"hogwild": 1.0}, "workers": (2,), "batch_sizes": (64,), "seeds": 1}, "One run is no proof", set()),
        ({"timing_only": True, "seeds": 6}, "as many samples per second", {"throughput", "speed-up", "outcomes"}),
        ({"limit_s": 0.0001}, "No run reached even 75 % of its initial loss", {"throughput", "outcomes"}),
        ({"methods": {"a": 1, "b": 1}, "workers": (1,), "batch_sizes": (64,), "seeds": 2}, "No winner:", {"waiting"}),
    ],
    ids=["one factor", "one trial", "timing only", "nothing reached", "too few to say"],
)  # fmt: skip
def test_other_studies(tmp_path, options, said, figures):
    page = page_of(make_table(**options), tmp_path, study='name = "other"\n')
    assert said in text_of(page)
    assert figures <= set(figures_of(page))
    assert "None" not in text_of(page)
    assert not re.search(r"\b(nan|inf|NaN)\b", text_of(page))


def test_a_table_without_trials_is_a_page_too(tmp_path):
    table = make_table(seeds=1)
    assert "has no trials yet" in text_of(page_of(table[:0], tmp_path))
    assert "has no trials yet" in text_of(page_of(table[[]][:0], tmp_path, study="damaged = = \n"))


def test_lanes_of_a_pair_are_drawn_where_its_events_were_kept(tmp_path):
    table = make_table({"locked": 1.0, "leashed(persistence=0)": 1.3}, batch_sizes=(64,), seeds=3)
    for _, row in table[(table["factor.workers"] == 4) & (table["factor.seed"] == 1)].iterrows():
        make_run(row["factor.algorithm"], steps=40).save(tmp_path / "trials" / row["trial"])
    lanes = figures_of(page_of(table, tmp_path))["lanes"]
    assert "The pair: 4 workers, seed 1." in lanes["note"]
    assert {trace["meta"] for trace in lanes["traces"]} == {"locked", "leashed(persistence=0)"}


def test_the_baseline_may_be_chosen(tmp_path):
    page = page_of(make_table(seeds=2), tmp_path, baseline="hogwild")
    assert "hogwild" in text_of(page)


def test_text_of_users_stays_text(tmp_path):
    hostile = "<script>bad()</script>\"'&"
    table = make_table({hostile: 1.0, "b": 1.2}, seeds=2)
    table["environment.machine"] = hostile
    page = page_of(table, tmp_path, study=f"name = '''{hostile[:-2]}'''\nquestion = '''{hostile[:-2]}'''\n")
    assert "<script>bad" not in page
