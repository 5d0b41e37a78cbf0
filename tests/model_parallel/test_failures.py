"""A placed model whose worker dies or hangs, and the run that goes on with fewer."""

import os
import signal
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import forked
import leftovers
import paceline as pl
from chosen import soaked
from model_parallel.models import (
    BATCH,
    LONG_STEPS,
    STEPS,
    alone,
    data,
    is_saved,
    long_loader,
    made,
    placed,
    planned,
    train_killed,
    train_long,
)
from paceline.records import checkpoint_contents as checkpoint
from paceline.records import checkpoint_files
from paceline.run import supervisor
from processes.scripts import started


def epochs_saved(folder):
    """After how many a killed run is gone on with: the last checkpoint may not have been complete when the worker died."""
    return checkpoint.load_parameters(checkpoint_files.newest(folder / "checkpoint")).next_batch // STEPS


@pytest.mark.parametrize("name", ["two towers", "dropout"])
def test_a_killed_worker_is_named_and_two_go_on_from_the_checkpoint_with_nothing_lost(name, tmp_path):
    folder = tmp_path / "run"
    three = planned(name, 3)
    loop = partial(train_killed, name, three, folder, 1, 2 * STEPS + 3, signal.SIGKILL, 10_000)
    begun_s = time.monotonic()
    with pytest.raises(pl.WorkerLostError, match=r"Worker 1 was ended by signal 9.*[Ww]orker \d waited for worker \d"):
        pl.launch(loop, workers=3, plan=three, out=folder, checkpoint_every_s=0, step_deadline_s=590)
    assert time.monotonic() - begun_s < 300, "noticed long before the deadline of a step"
    plan, epochs = planned(name, 2), epochs_saved(folder) + 2
    run, found = placed(name, plan, tmp_path, resume=folder, checkpoint_every_s=0, loop={"epochs": epochs})
    assert len(found[0][0]) == 2 * STEPS, "from the beginning of an epoch"
    assert run.result["steps"] == epochs * STEPS
    _, model = alone(name, epochs=epochs, plan=planned(name, 1) if name == "dropout" else None)
    for _, state in found:
        assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())


def check_goes_on(plan, folder, tmp_path):
    """Fewer workers make three steps from a checkpoint within an epoch; they end as one process that has made all steps."""
    done = checkpoint.load_parameters(checkpoint_files.newest(folder / "checkpoint")).next_batch
    assert 0 < done < LONG_STEPS
    fewer = plan.again(devices=[pl.Device()] * 2)
    run = pl.launch(partial(train_long, fewer, tmp_path, more=3), workers=2, plan=fewer, resume=folder)
    assert run.result["steps"] == done + 3
    assert run.result["samples"] == (done + 3) * BATCH
    model = made("two towers")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _, (x, y) in zip(range(done + 3), long_loader(), strict=False):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    for worker in range(2):
        state = torch.load(tmp_path / f"{worker}.pt")
        assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())


LONG = f"""
    import sys
    from functools import partial

    import paceline as pl

    sys.path.insert(0, {str(Path(__file__).parents[1])!r})
    from model_parallel.models import train_long

    if __name__ == "__main__":
        plan = pl.Plan.load("plan.json")
        pl.launch(partial(train_long, plan, "."), workers=3, plan=plan, out="run", checkpoint_every_s=1e6)
"""


def test_a_kill_in_a_long_epoch_costs_the_steps_since_the_last_checkpoint_within_it(tmp_path):
    plan, folder = planned("two towers", 3), tmp_path / "run"
    loop = partial(train_long, plan, tmp_path, folder)
    with pytest.raises(pl.WorkerLostError, match="resume from the newest checkpoint"):
        pl.launch(loop, workers=3, plan=plan, out=folder, checkpoint_every_s=0.01, step_deadline_s=590)
    check_goes_on(plan, folder, tmp_path)


def test_sigterm_ends_all_parts_after_the_same_step_which_fewer_workers_go_on_from(tmp_path):
    plan, folder = planned("two towers", 3), tmp_path / "run"

    plan.save(tmp_path / "plan.json")
    with started(tmp_path, LONG) as process:
        spool = folder / "events-0.bin"
        leftovers.wait_until(lambda: process.poll() or (spool.exists() and spool.stat().st_size > 6000), "some steps")
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(forked.AGAINST_HANGS_S)
    assert process.returncode in (-signal.SIGTERM, 143), errors
    newest = checkpoint_files.newest(folder / "checkpoint")
    assert pl.RunData.load(folder).result["version"] == checkpoint.load_parameters(newest).version > 0
    check_goes_on(plan, folder, tmp_path)


def test_a_worker_that_hangs_ends_the_step_on_all_within_the_deadline(monkeypatch):
    monkeypatch.setattr(supervisor, "_INTERRUPTED_GRACE_S", 2.0)  # until the one that hangs is killed
    plan = planned("two towers", 2)
    loop = partial(train_killed, "two towers", plan, None, 1, 3, signal.SIGSTOP, 1)
    with pytest.raises(
        pl.WorkerLostError,
        match=r"^Worker 1 stalled\. Worker 0 waited for worker 1, .*(nothing came within 6 s|it has left)",
    ):
        pl.launch(loop, workers=2, plan=plan, step_deadline_s=6)  # which no step waits for a core


def test_a_placed_run_does_not_go_on_from_another_kind_of_run(tmp_path):
    name = "two towers"
    placed(name, planned(name, 2), tmp_path, out=tmp_path / "placed", checkpoint_every_s=0)
    loop = partial(plain, name)
    pl.launch(loop, workers=2, algorithm="hogwild", out=tmp_path / "plain", checkpoint_every_s=0)
    with pytest.raises(pl.UsageError, match="started with hogwild: give launch the same algorithm"):
        placed(name, planned(name, 2), tmp_path, resume=tmp_path / "plain")


def test_a_checkpoint_that_lacks_a_workers_part_is_refused(tmp_path):
    """As an earlier version completed it without a worker that had died; what is lacking would silently begin anew."""
    name, folder = "two towers", tmp_path / "run"
    placed(name, planned(name, 2), tmp_path, out=folder, checkpoint_every_s=0)
    newest = checkpoint_files.newest(folder / "checkpoint")
    about = checkpoint_files.describe(newest)
    for part, digest in about.pop("sha256").items():
        (newest / f"{part}.sha256").write_text(digest)
    number, _, _ = about.pop("number"), about.pop("workers"), about.pop("sha256_of_this", None)
    (newest / "complete.json").unlink()
    assert checkpoint_files.complete(newest.parent, number, [0], about)
    with pytest.raises(pl.UsageError, match=r"lacks b\.0\.\w+ of this model, because a worker's part is missing"):
        placed(name, planned(name, 2), tmp_path, resume=folder, loop={"epochs": 4})


def plain(name):
    from model_parallel.models import BATCH, data, made, steps_of

    model = made(name)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with pl.attach(model, optimizer) as worker:
        steps_of(model, optimizer, worker.batches(torch.utils.data.DataLoader(data(name), batch_size=BATCH)))


def change_settings(how, optimizer, follow=lambda schedule: schedule):
    """What a loop does to its optimizer's settings: after each step, and after each epoch."""
    step, epoch = (lambda in_epoch, at: None), (lambda: None)
    if how == "a schedule of epochs":
        epoch = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5).step
    elif how == "a schedule of steps":
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        step = lambda in_epoch, at: schedule.step()  # noqa: E731
    elif how == "a schedule that follows the run":
        schedule = follow(torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5))
        step = lambda in_epoch, at: schedule.step()  # noqa: E731
    else:

        def step(in_epoch, at):
            if (in_epoch, at) == (0, 2):  # which a resumed loop does not come to again
                optimizer.param_groups[0].update(lr=optimizer.param_groups[0]["lr"] / 4, betas=(0.5, 0.9))
                optimizer.param_groups[-1]["weight_decay"] = 0.1

    return step, epoch


def two_groups(named):
    weights = [one for name, one in named if name.endswith("weight")]
    return torch.optim.Adam([{"params": weights}, {"params": [one for _, one in named if one.dim() == 1], "lr": 0.03}])


def train_changing(how, plan, folder, epochs, out=None):
    """Worker 1 is killed in an epoch from the third on of a run with a folder."""
    part = plan.part(made("two towers"))
    optimizer = two_groups(list(part.named_parameters()))
    loader = torch.utils.data.DataLoader(data("two towers"), batch_size=BATCH)
    with pl.attach(part, optimizer) as worker:
        step, epoch = change_settings(how, optimizer, worker.follow)
        for in_epoch in range(epochs):
            for at, (x, y) in enumerate(worker.batches(loader)):
                if worker.worker_id == 1 and out is not None and in_epoch >= 2 and at == 3 and is_saved(out):
                    os.kill(os.getpid(), signal.SIGKILL)
                optimizer.zero_grad()
                F.cross_entropy(part(x), y).backward()
                optimizer.step()
                step(in_epoch, at)
            epoch()
    torch.save(part.whole.state_dict(), Path(folder) / f"{worker.worker_id}.pt")


HOWS = ["a schedule of steps", "a schedule that follows the run", "by hand", *soaked("a schedule of epochs")]


@pytest.mark.parametrize("how", HOWS)
def test_settings_that_the_run_has_changed_are_those_of_the_checkpoint(how, tmp_path):
    folder, (three, two) = tmp_path / "run", (planned("two towers", workers) for workers in (3, 2))
    killed = partial(train_changing, how, three, tmp_path, 10_000, folder)
    with pytest.raises(pl.WorkerLostError):
        pl.launch(killed, workers=3, plan=three, out=folder, checkpoint_every_s=0)
    epochs = epochs_saved(folder) + 2
    resumed = partial(train_changing, how, two, tmp_path, epochs)
    pl.launch(resumed, workers=2, plan=two, resume=folder, checkpoint_every_s=0)
    model = made("two towers")
    optimizer = two_groups(list(model.named_parameters()))
    step, epoch = change_settings(how, optimizer)
    for in_epoch in range(epochs):
        for at, (x, y) in enumerate(torch.utils.data.DataLoader(data("two towers"), batch_size=BATCH)):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            step(in_epoch, at)
        epoch()
    for worker in range(2):
        state = torch.load(tmp_path / f"{worker}.pt")
        assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())
