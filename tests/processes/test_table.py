"""Cells of the table of loops, on real processes: a fifteenth of them here, all in `make soak`."""

import contextlib
from functools import partial

import pytest
import torch

import paceline as pl
from loops import table
from loops.problem import held_out_loss
from loops.test_table import SHARE, plainly
from processes.programs import worker_id

CHOSEN = set(table.on_processes())  # once: every worker imports this file
OWN_AVERAGES = ["ema_before", "ema_inside"]  # what is judged is of a worker's own steps, and not the run's model


def made_most(run, worker):
    """Whether it has made as many steps as any other: of batches that workers race for, one may get few, or none."""
    return len(run.records[worker]) == max(map(len, run.records.values()))


def train(habit, folder):
    """One worker of a launched run; leaves its loss on held-out data in a file."""
    loss = held_out_loss(table.module_of(habit).loop(pl.attach))
    torch.save(loss, f"{folder}/{worker_id()}.pt")


def check(habit, algorithm, folder):
    cell = table.expected(habit, algorithm)
    refused = cell is not None and not cell.is_warning
    with pytest.raises(pl.PacelineError, match=cell.says) if refused else contextlib.nullcontext():
        run = pl.launch(partial(train, habit, folder), workers=2, algorithm=algorithm)
    if not refused:
        assert run.result["outcome"] == "stopped"
        _, untrained, trained = plainly(habit)
        judged = [worker for worker in range(2) if habit not in OWN_AVERAGES or made_most(run, worker)]
        losses = [torch.load(folder / f"{worker}.pt") for worker in judged]
        assert max(losses) < untrained - SHARE * (untrained - trained), (untrained, trained)


@pytest.mark.parametrize(("habit", "algorithm"), table.on_processes())
def test_two_launched_workers(habit, algorithm, tmp_path):
    check(habit, algorithm, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize(("habit", "algorithm"), [one for one in table.cells() if one not in CHOSEN])
def test_all_other_cells(habit, algorithm, tmp_path):
    check(habit, algorithm, tmp_path)
