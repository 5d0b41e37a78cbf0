"""What an algorithm says about itself."""

import dataclasses

import pytest

import paceline as pl
from contracts.table import rows
from paceline.algorithms import registry


@rows()
def test_spec_round_trips(row):
    assert pl.parse(row.spec) == row.algorithm
    assert pl.spec(pl.parse(row.spec)) == row.spec
    assert pl.parse(registry.spec(row.algorithm, defaults=True)) == row.algorithm


@pytest.mark.parametrize("name", registry.names())
def test_docstring_is_a_card(name):
    kind = registry[name]
    card = kind.__doc__
    wanted = ["Costs"] if kind.max_workers == 1 else ["Costs per step:", "Use when:", "Not:", "Reference:"]
    assert [word for word in (*wanted, "Clipping acts on") if word not in card] == []
    for field in dataclasses.fields(kind):
        assert f"{field.name}:" in card.partition("Args:")[2]


@pytest.mark.parametrize("name", registry.names())
def test_says_what_it_tolerates(name):
    kind = registry[name]
    assert set(kind.tolerates) <= {"kill", "kill under launch", "kill on one machine", "straggler"}
    assert "kill" not in kind.tolerates or not kind.lockstep
