"""`paceline algorithms NAME`, `paceline cite`, and what every algorithm's docstring must say."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
import typer.main

import paceline
from paceline.algorithms import registry
from paceline.cli.app import app
from paceline.cli.card import card

ROOT = Path(__file__).parents[2]
MUST_SAY = (
    "Costs per step", "Use when", "Not to be confused with", "Tolerates", "Clipping", "Differences from the paper",
    "Reference",
)  # fmt: skip


@pytest.mark.parametrize("name", list(registry))
def test_every_card_is_whole(name):
    one = card(name)
    assert set(MUST_SAY) <= set(one.parts)
    assert not any(text[0].islower() for text in one.parts.values()), one.parts
    fields = {field.name for field in dataclasses.fields(registry[name]) if field.init}
    assert set(one.arguments) == fields
    assert not any(heading in paragraph for paragraph in one.about for heading in ("Args:", "Costs per", "Use when"))
    assert re.search(r"\d{4}", one.parts["Reference"])


def test_a_card_in_a_terminal_and_as_json(run):
    shown = " ".join(run("algorithms", "leashed").stdout.split())
    one = card("leashed")
    for text in (one.summary, *one.about, *one.parts.values(), *one.arguments.values(), one.spec):
        assert text in shown
    assert json.loads(run("algorithms", "leashed", "--json").stdout) == json.loads(json.dumps(dataclasses.asdict(one)))


def test_a_card_that_there_is_not(run):
    refused = run("algorithms", "hogwld")
    assert refused.exit_code == 2
    assert "Did you mean 'hogwild'?" in refused.stderr
    assert run("algorithms", "hogwild", "--tolerates", "kill").exit_code == 2


def test_what_is_cited_is_the_citation_file_s(run):
    cited = run("cite", "ad-psgd").stdout
    file = (ROOT / "CITATION.cff").read_text()
    for key in ("title", "version"):
        (value,) = re.findall(rf'^{key}: "?(.*?)"?$', file, re.MULTILINE)
        assert f"{key} = {{{value}}}" in cited
    assert f"version: {paceline.__version__}\n" in file
    assert card("ad-psgd").parts["Reference"] in cited
    assert run("cite", "hogwld").exit_code == 2


def test_every_verb_s_help_names_a_page_that_is_there(run):
    verbs = typer.main.get_command(app).commands
    for verb in [[], *([name] for name in verbs)]:
        text = " ".join(run(*verb, "--help").stdout.split())
        (page,) = re.findall(r"More: (docs/\w+\.md)", text)
        assert (ROOT / page).exists(), page


def test_a_card_says_what_an_argument_changes_about_slow_workers():
    assert "with `shares=auto` it gets smaller batches" in card("all-reduce").parts["Tolerates"]
    assert "the default, all wait for a slow worker" in card("parameter-server").parts["Tolerates"]
    assert "waited for" not in card("downpour").parts["Tolerates"]
