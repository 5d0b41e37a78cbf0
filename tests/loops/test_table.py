"""Every cell of the table, simulated."""

import contextlib
import re
from functools import cache

import pytest
import torch
from torch import nn

import paceline as pl
from loops import page, table
from loops.coder import own_id
from loops.families import ALL
from loops.habits import plain_attach
from loops.problem import EPOCHS, first_losses, held_out_loss
from paceline.algorithms import registry

HAVE_TWO_FAULTS = ["penalty_after_backward", "sparse_table"]  # what takes the first may yet refuse the second
SHARE = 0.4  # of what the plain loop learns, with half as many updates or with stale ones
SHORT, SHORT_STEPS = 2, 30  # epochs of simulated loops, and steps of those without
#: Something happens late in these, or little is learnt in the first updates.
LONG = [
    "clamped",
    "early_stopping",
    "followed_schedule",
    "own_plateau",
    "plateau",
    "sparse_table",
    "step_lr",
    "unfrozen",
]


@pytest.fixture
def epochs(habit, monkeypatch):
    """How many the loop has: few, if its habit shows by then; or it has as few steps of its own."""
    if habit in LONG:
        return EPOCHS
    for name, few in (("EPOCHS", SHORT), ("STEPS", SHORT_STEPS)):
        monkeypatch.setattr(table.module_of(habit), name, few, raising=False)
    return SHORT


@cache
def plainly(habit, epochs=EPOCHS):
    """The plain loop's model and how much it has learnt: by how much the loss on held-out data has fallen."""
    model = table.module_of(habit).loop(plain_attach)
    untrained, trained = first_losses["last"], held_out_loss(model)
    assert trained < 0.9 * untrained, "or nothing could be asked of other runs"
    return vector(model), untrained, trained


def vector(model):
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def expecting(cell):
    if cell is None:
        return contextlib.nullcontext()
    return (
        pytest.warns(UserWarning, match=cell.says) if cell.is_warning else pytest.raises(pl.UsageError, match=cell.says)
    )


def check_remedy(said, habit, algorithm):
    """What a refusal names instead takes this loop, and can be started as the refused run can, or the starter is named."""
    remedy = said.replace(registry.spec(registry.build(algorithm)), "")
    named = {one for one in ALL if re.search(rf"(?<![\w-]){re.escape(one.partition('(')[0])}(?![\w-])", remedy)}
    named -= {one for one in named if "(" in one and one.partition("(")[0] in ALL}  # said as of its family's first
    for one in named:
        other = table.expected(habit, one)
        assert other is None or other.is_warning or habit in HAVE_TWO_FAULTS, f"{one} refuses it, too"
    by_memory = named & {"hogwild", "locked", "leashed"}
    assert "paceline.launch" in said or not by_memory, f"torchrun does not start {by_memory}"
    assert algorithm != "ad-psgd" or "torchrun" in said or not named, (
        f"paceline launch -- SCRIPT does not start {named}"
    )


@pytest.mark.parametrize("habit", table.HABITS)
def test_alone_it_is_plain_pytorch_bit_for_bit(habit):
    cell = table.expected(habit, table.ALONE)
    with expecting(cell):
        ours = table.module_of(habit).loop(pl.attach)
    if cell is None:
        assert torch.equal(vector(ours), plainly(habit)[0])


@pytest.mark.parametrize(("habit", "algorithm"), table.cells())
def test_two_simulated_workers(habit, algorithm, epochs):
    cell, losses = table.expected(habit, algorithm), {}

    def body():
        losses[own_id()] = held_out_loss(table.module_of(habit).loop(pl.attach))

    with expecting(cell) as said:
        run = pl.simulate(body, workers=2, algorithm=algorithm)
    if cell is not None and not cell.is_warning:
        check_remedy(str(said.value), habit, algorithm)
    else:
        assert run.result["outcome"] == "stopped"
        _, untrained, trained = plainly(habit, epochs)
        assert len(losses) == 2
        assert max(losses.values()) < untrained - SHARE * (untrained - trained), (untrained, trained)


def test_the_page_shows_the_table():
    written = page.PAGE.read_text(encoding="utf-8")
    assert page.filled(written) == written, "python -m loops.page, in the folder of tests, writes it"


def test_every_habit_and_every_family_has_cells_on_real_processes():
    chosen = table.on_processes()
    assert {habit for habit, _ in chosen} == set(table.HABITS)
    assert {algorithm for _, algorithm in chosen} == set(ALL)
    assert 50 <= len(chosen) <= 100
