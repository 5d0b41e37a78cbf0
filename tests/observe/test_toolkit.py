"""What all reports are made of: cells that stay text, legends without repeats, lines on logarithmic axes, words."""

import math
import re

import pytest

from paceline.observe.document import Cell, Table, markup, settings_table, write_page
from paceline.observe.drawing import Panels, add_rule, error_bars, log_axis, numbers, thin
from paceline.observe.words import capital, column_unit, counted, joined, span_text

HOSTILE = "<b>&\"'"
ESCAPED = "&lt;b&gt;&amp;&#34;&#39;"


def shown(table):
    return markup("observe/cell.html", headline=HOSTILE, curve={}, runs=table, notes=HOSTILE)


def test_text_in_every_part_of_a_page_stays_text():
    every = Cell(HOSTILE, HOSTILE)
    page = shown(Table([[every, every, HOSTILE]], [every, HOSTILE]))
    assert HOSTILE not in page
    assert page.count(ESCAPED) == 10


def test_a_setting_that_all_runs_share_is_said_once():
    page = shown(settings_table([("seed", [0, 1]), ("slow", [{0: 4.0}, {0: 4.0}])], ["", "a", "b"]))
    assert re.search(r"<td>0</td>\s*<td>1</td>", page)
    assert '<td colspan="2">{&#34;0&#34;: 4.0}</td>' in page


def test_numbers_stay_with_their_units_and_specs_break_at_punctuation(tmp_path):
    page = write_page(
        tmp_path / "page.html", "observe/page.html", title="x", headline="in 2 s (a_b)", figures=[]
    ).read_text()
    assert "in 2&nbsp;s (a_b)" in page
    assert "hogwild(<wbr>step_<wbr>size=<wbr>1)" in shown(Table([["hogwild(step_size=1)"]]))


def test_what_is_drawn_in_several_panels_is_once_in_the_legend():
    panels = Panels(["one", "two"], [100, 100])
    for panel in (0, 1):
        panels.add(panel, legend="a", name="a")
    panels.add(1, name="not in it")
    assert [trace["showlegend"] for trace in panels.traces] == [True, False, False]
    assert [trace["yaxis"] for trace in panels.traces] == ["y", "y2", "y2"]
    assert panels.layout["yaxis"]["domain"][0] > panels.layout["yaxis2"]["domain"][1], "the first is above the second"


def test_a_rule_stands_where_it_says_on_a_logarithmic_axis_too():
    layout = {"xaxis": {}, "yaxis": log_axis(0.01, 10.0)}
    add_rule(layout, "target", y=0.1)
    add_rule(layout, "deadline", x=5.0)
    assert [line["y0"] for line in layout["shapes"]] == [0.1, 0]
    assert [line["label"]["text"] for line in layout["shapes"]] == ["target", "deadline"]
    assert layout["shapes"][1]["x0"] == layout["shapes"][1]["x1"] == 5.0


def test_an_end_that_is_not_known_has_no_bar():
    bars = error_bars([2.0, 2.0, math.nan], [1.0, math.nan, 1.0], [5.0, math.inf, 2.0], "@soft")
    assert (bars["array"], bars["arrayminus"]) == ([3.0, 0.0, 0.0], [1.0, 0.0, 0.0])


def test_numbers_are_finite_and_points_are_thinned_evenly():
    assert numbers([1.23456789, math.inf, math.nan], 3) == [1.23, None, None]
    assert thin(5, 10).tolist() == [0, 1, 2, 3, 4]
    assert thin(100, 3).tolist() == [0, 49, 99]
    assert not len(thin(0, 3))


@pytest.mark.parametrize(
    ("parts", "said"), [([], ""), (["a"], "a"), (["a", "b"], "a and b"), (["a", "b", "c"], "a, b and c")]
)
def test_lists_are_joined(parts, said):
    assert joined(parts) == said


def test_words():
    assert (counted(1, "pair"), counted(0, "pair"), capital("batch size"), span_text(1.1, 22232)) == (
        "1 pair", "0 pairs", "Batch size", "1.10 to 22,232",
    )  # fmt: skip
    assert [column_unit([value, math.inf]) for value in (0.001, 3.0, 2000.0, 9000.0)] == ["ms", "s", "min", "h"]
