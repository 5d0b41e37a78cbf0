"""`paceline place` as it is typed, and the example that it is shown with."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

import paceline as pl
from paceline.cli.app import app
from paceline.errors import UsageError
from paceline.specs.user_file import load_function

EXAMPLE = Path(__file__).parents[2] / "examples" / "placement.py"


def run(*words):
    return CliRunner().invoke(app, ["place", *map(str, words)])


TOWERS = """
import torch
from torch import nn


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.deep = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
        self.shallow, self.head = nn.Linear(256, 256), nn.Linear(512, 10)

    def forward(self, x):
        return self.head(torch.cat([self.deep(x), self.shallow(x)], 1))


def model():
    return Towers(), torch.randn(512, 256)
"""


def test_plan_page_trace_and_file(tmp_path):
    """Of a model that is measured sooner than the example, which placement.md places."""
    (tmp_path / "towers.py").write_text(TOWERS)
    paths = [tmp_path / name for name in ("plan.json", "plan.html", "trace.json")]
    options = [word for pair in zip(("--plan", "--report", "--trace"), paths, strict=True) for word in pair]
    result = run(f"{tmp_path}/towers.py:model", "--devices", 2, "--slow", "1:3", "--force", "--json", *options)
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout.splitlines()[-1])
    plan = pl.Plan.load(paths[0])
    assert told["makespan_s"] == plan.makespan_s
    assert [one.slowness for one in plan.problem.devices] == [1.0, 3.0]
    page = paths[1].read_text()
    assert "coloured by device" in page
    assert "One step, simulated" in page
    assert re.search(r'"name": ?"device 0"', page), "a legend says whose colour is which"
    names = {one["name"] for one in json.loads(paths[2].read_text())["traceEvents"]}
    assert any(name.startswith("backward ") for name in names)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nothing.py:model"], "nothing.py does not exist"),
        ([EXAMPLE], "does not name a function in a file"),
        ([f"{EXAMPLE}:models"], "has no function 'models'"),
        ([f"{EXAMPLE}:tower"], "tower of .* failed"),
        ([f"{EXAMPLE}:model", "--slow", "3"], "--slow must be DEVICE:FACTOR, such as 1:3, not '3'"),
        ([f"{EXAMPLE}:model", "--slow", "a:3"], "--slow must be DEVICE:FACTOR, such as 1:3, not 'a:3'"),
        ([f"{EXAMPLE}:model", "--memory", "lots"], "--memory must be a number with KB, MB or GB"),
        ([f"{EXAMPLE}:model", "--shape", "3,3"], "--shape must be numbers joined by x"),
        ([f"{EXAMPLE}:model", "--pin", "wide:0", "--force"], "no module or operation 'wide' to pin"),
    ],
)
def test_wrong_words_are_one_sentence(words, says):
    result = run(*words)
    assert result.exit_code == 2, result.output
    said = " ".join(result.stderr.split())
    assert re.search(says, said), said
    assert "Traceback" not in result.output


def test_the_examples_plan_is_better_in_simulation_than_all_on_one_and_an_even_split():
    model = load_function(EXAMPLE, "model", what="File", written="")
    plan = pl.place(*model(), devices=2, slow={1: 3.0}, repeats=2, force=True)
    equal = plan.again(devices=[pl.Device()] * 2, placer="balanced")
    split = plan.again(device_of={one.name: equal.device_of[one.nodes[0]] for one in plan.problem.groups})
    assert plan.makespan_s <= plan.again(placer="all-on-one").makespan_s
    assert plan.makespan_s < split.makespan_s
    with pytest.raises(UsageError, match="device_of must name all groups"):
        plan.again(device_of={"deep": 0})


def test_a_chain_says_before_that_it_gains_nothing(tmp_path):
    file = tmp_path / "chain.py"
    file.write_text(
        "import torch\nfrom torch import nn\n"
        "def model():\n    return nn.Sequential(*(nn.Linear(256, 256) for _ in range(6))), torch.randn(512, 256)\n"
    )
    result = run(f"{file}:model", "--force")
    assert "All on one device, 1.0x" in result.stdout
    assert "throughput" in result.stdout
