"""Every cell of the table, simulated."""

import contextlib
from functools import cache

import pytest
import torch
from torch import nn

import paceline as pl
from loops import page, table
from loops.coder import own_id
from loops.families import ALL
from loops.habits import plain_attach
from loops.problem import first_losses, held_out_loss

SHARE = 0.4  # of what the plain loop learns, with half as many updates or with stale ones


@cache
def plainly(habit):
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


@pytest.mark.parametrize("habit", table.HABITS)
def test_alone_it_is_plain_pytorch_bit_for_bit(habit):
    cell = table.expected(habit, table.ALONE)
    with expecting(cell):
        ours = table.module_of(habit).loop(pl.attach)
    if cell is None:
        assert torch.equal(vector(ours), plainly(habit)[0])


@pytest.mark.parametrize(("habit", "algorithm"), table.cells())
def test_two_simulated_workers(habit, algorithm):
    cell, losses = table.expected(habit, algorithm), {}

    def body():
        losses[own_id()] = held_out_loss(table.module_of(habit).loop(pl.attach))

    with expecting(cell):
        run = pl.simulate(body, workers=2, algorithm=algorithm)
    if cell is None or cell.is_warning:
        assert run.result["outcome"] == "stopped"
        _, untrained, trained = plainly(habit)
        assert len(losses) == 2
        assert max(losses.values()) < untrained - SHARE * (untrained - trained), (untrained, trained)


def test_the_page_shows_the_table():
    written = page.PAGE.read_text(encoding="utf-8")
    assert page.filled(written) == written, "python -m loops.page, in the folder of tests, writes it"


def test_every_habit_and_every_family_has_cells_on_real_processes():
    chosen = table.on_processes()
    assert {habit for habit, _ in chosen} == set(table.HABITS)
    assert {algorithm for _, algorithm in chosen} == set(ALL)
    assert 90 <= len(chosen) <= 150
