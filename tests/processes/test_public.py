"""The loops in the manner of PyTorch's examples, whole, under each family: two launched workers end where one does."""

from functools import partial
from pathlib import Path

import pytest
import torch

import paceline as pl
import soak_results
from loops import public
from loops.test_public import plainly
from processes.programs import worker_id

SHARE = 0.9  # of what one worker learns


def train(name, folder):
    """One worker of a launched run; leaves what its model has left to learn in a file."""
    left = public.run(name, pl.attach, public.module_of(name).SIZES["soak"])
    torch.save(left, Path(folder) / f"{worker_id()}.pt")


def samples_of(name, settings):
    """How many samples the whole run trains on, as one worker does; None: that depends on its luck."""
    if name == "reinforce":
        return None
    if name == "word_language_model":
        columns, _ = public.module_of(name).text(settings["words"])
        return settings["epochs"] * (len(columns) - 1) * columns.shape[1]
    number = len(public.datasets(settings.get("task"), settings["samples"])[0])
    return settings["epochs"] * (2 * (number // 32 * 32) if name == "dcgan" else number)


def check(name, algorithm, folder):
    run = pl.launch(partial(train, name, str(folder)), workers=2, algorithm=algorithm)
    assert run.result["outcome"] == "stopped"
    untrained, trained = plainly(name, "soak")
    left = [torch.load(folder / f"{worker}.pt") for worker in range(2)]
    figures = {"untrained": untrained, "one worker": trained, "two workers": left, "samples": run.result["samples"]}
    soak_results.keep("soak_public_loops", f"{name} {algorithm}", figures)
    assert max(left) <= untrained - SHARE * (untrained - trained), figures
    assert left[0] == pytest.approx(left[1], rel=0.02), "both leave the run's model"
    expected = samples_of(name, public.module_of(name).SIZES["soak"])
    assert expected in (None, run.result["samples"]), (expected, figures)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("name", "algorithm"), [(name, one) for name in public.NAMES for one in public.meant_for(name)]
)
def test_two_launched_workers_end_where_one_does(name, algorithm, tmp_path):
    check(name, algorithm, tmp_path)
