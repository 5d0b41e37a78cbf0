"""Schedules of the learning rate: followed, they end where they end alone; stepped per step otherwise, they are warned of."""

import math
import warnings

import pytest
import torch
from torch.optim import lr_scheduler

import paceline as pl
from chosen import each_value
from loops import families
from loops.coder import batches, loss_of, made, own_id, vector
from paceline.loop.run_progress import RunProgress

# SequentialLR's own, up to PyTorch 2.8
pytestmark = pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step:UserWarning")
TOTAL = 24  # steps of the loop alone
PER_STEP = "stepped once per step"
ASYNCHRONOUS = [*families.ASYNCHRONOUS, *families.SERVED]


def one_cycle(optimizer):
    return lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=TOTAL)


def warm_up_and_cosine(optimizer):
    warm_up = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5)
    return lr_scheduler.SequentialLR(
        optimizer, [warm_up, lr_scheduler.CosineAnnealingLR(optimizer, TOTAL - 5)], milestones=[5]
    )


def by_hand(optimizer):
    return lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 - step / TOTAL)


SCHEDULES = [one_cycle, warm_up_and_cosine, by_hand]


def rate(optimizer):
    return optimizer.param_groups[0]["lr"]


def plain(schedule, xs):
    """The model, and the rate before every step and after the last."""
    model, optimizer = made()
    scheduler = schedule(optimizer)
    rates = []
    for x in xs:
        rates.append(rate(optimizer))
        optimizer.zero_grad()
        loss_of(model, x).backward()
        optimizer.step()
        scheduler.step()
    return vector(model), [*rates, rate(optimizer)]


def followed(schedule, kept, own=None, steps=True, samples_per_step=None):
    def loop():
        model, optimizer = made()
        scheduler = schedule(optimizer)
        with pl.attach(model, optimizer) as worker:
            scheduler = worker.follow(scheduler, samples_per_step=samples_per_step)
            rates = kept.setdefault(own_id(), [])
            for x in worker.batches(batches(TOTAL, worker=9)) if own is None else own():
                rates.append(rate(optimizer))
                optimizer.zero_grad()
                loss_of(model, x).backward()
                optimizer.step()
                if steps:
                    scheduler.step()
            rates.append(rate(optimizer))
        return vector(model)

    return loop


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("algorithm", [one for one in families.ALL if one not in families.OWN_RULE])
def test_one_worker_is_plain_training_bit_for_bit(algorithm, schedule):
    for own in (None, lambda: batches(TOTAL, worker=9)):
        kept = {}
        run = pl.simulate(followed(schedule, kept, own), workers=1, algorithm=algorithm)
        x, rates = plain(schedule, batches(TOTAL, worker=9))
        assert torch.equal(run.returned[0], x)
        assert kept[0] == rates


@pytest.mark.parametrize(
    ("algorithm", "stepped"),
    each_value(families.ALL, [(one_cycle, True), (warm_up_and_cosine, False), (by_hand, True)]),
)
def test_n_workers_end_where_one_ends(algorithm, stepped):
    (schedule, steps), kept = stepped, {}
    pl.simulate(followed(schedule, kept, steps=steps), workers=3, algorithm=algorithm)
    _, rates = plain(schedule, batches(TOTAL, worker=9))
    assert min(abs(rate - rates[-1]) for rates_seen in kept.values() for rate in rates_seen[-1:]) < 1e-9
    for seen in kept.values():
        assert all(any(abs(one - other) < 1e-12 for other in rates) for one in seen)  # of those steps, some
        assert max(seen) > 0.8 * max(rates)
        assert seen[-1] == pytest.approx(rates[-1], abs=0.25 * max(rates))  # it was the last, or one of the last three


@pytest.mark.parametrize("algorithm", [*families.SHARED_LOCKSTEP, *families.OWN_LOCKSTEP])
def test_in_lockstep_all_have_the_same_rate_and_skip_as_many_steps_as_there_were_batches(algorithm):
    kept = {}

    def ten():  # 4 + 4 + 2 batches for 4 workers
        return batches(10, worker=9)

    def loop():
        model, optimizer = made()
        scheduler = by_hand(optimizer)
        with pl.attach(model, optimizer) as worker:
            worker.follow(scheduler)
            for _ in range(2):
                for x in worker.batches(ten()):
                    kept.setdefault(own_id(), []).append((rate(optimizer), worker.progress))
                    optimizer.zero_grad()
                    loss_of(model, x).backward()
                    optimizer.step()
            kept[own_id()].append((rate(optimizer), worker.progress))
        return vector(model)

    run = pl.simulate(loop, workers=4, algorithm=algorithm)
    rates = [0.1 * (1.0 - step / TOTAL) for step in range(21)]
    rounds = [0, 4, 8, 10, 14, 18, 20]
    expected = [(pytest.approx(rates[n], abs=1e-12), 4 * n) for n in rounds]
    assert kept[0] == kept[1] == kept[3] == expected
    if algorithm in families.SHARED_LOCKSTEP:
        assert all(torch.equal(run.returned[0], one) for one in run.returned.values())


@pytest.mark.parametrize("algorithm", families.SHARED_LOCKSTEP)
def test_progress_is_the_same_on_all_workers_of_a_model_whatever_they_draw(algorithm):
    kept = {}

    def loop():
        model, optimizer = made()
        with pl.attach(model, optimizer) as worker:
            for x in batches(6, size=2 + 3 * own_id()):
                optimizer.zero_grad()
                loss_of(model, x).backward()
                optimizer.step()
                kept.setdefault(own_id(), []).append(worker.progress)

    pl.simulate(loop, workers=3, algorithm=algorithm)
    assert kept[0] == kept[1] == kept[2] == [15 * n for n in range(1, 7)]


@pytest.mark.parametrize("algorithm", ASYNCHRONOUS)
def test_progress_of_workers_that_draw_for_themselves_ends_with_all_their_samples(algorithm):
    kept = []

    def loop():
        model, optimizer = made()
        with pl.attach(model, optimizer) as worker:
            for x in batches(8, size=2 + own_id()):
                optimizer.zero_grad()
                loss_of(model, x).backward()
                optimizer.step()
                kept.append(worker.progress)

    pl.simulate(loop, workers=3, algorithm=algorithm)
    assert kept == sorted(kept)
    assert kept[-1] == 8 * (2 + 3 + 4)


@pytest.mark.parametrize("algorithm", families.SHARED_LOCKSTEP)
def test_a_loop_that_divides_its_batch_says_how_many_samples_a_step_has_alone(algorithm):
    """24 steps of 8 samples: two workers make 24 of 4 each."""
    kept = {}
    own = lambda: batches(TOTAL)  # noqa: E731
    run = pl.simulate(followed(one_cycle, kept, own, samples_per_step=8), workers=2, algorithm=algorithm)
    together = [torch.cat(pair) for pair in zip(batches(TOTAL, worker=0), batches(TOTAL, worker=1), strict=True)]
    x, rates = plain(one_cycle, together)
    assert kept[0] == kept[1] == rates
    torch.testing.assert_close(run.returned[0], x, rtol=1e-4, atol=1e-5)


def test_a_saved_schedule_goes_on_where_it_was():
    _, rates = plain(by_hand, batches(TOTAL, worker=9))
    model, optimizer = made()
    with pl.attach(model, optimizer) as worker:
        scheduler = worker.follow(by_hand(optimizer))
        for x in batches(5):
            optimizer.zero_grad()
            loss_of(model, x).backward()
            optimizer.step()
        state = scheduler.state_dict()
    assert state["last_epoch"] == scheduler.last_epoch == 5
    model, optimizer = made()
    with pl.attach(model, optimizer) as worker:
        scheduler = worker.follow(by_hand(optimizer))
        scheduler.load_state_dict(state)
        for x in batches(3):
            optimizer.zero_grad()
            loss_of(model, x).backward()
            optimizer.step()
    assert rate(optimizer) == rates[8] == scheduler.get_last_lr()[0]


def test_a_schedule_that_is_stepped_twice_or_goes_by_a_measure_is_refused():
    model, optimizer = made()
    with pl.attach(model, optimizer) as worker:
        with pytest.raises(pl.UsageError, match="follows a metric"):
            worker.follow(lr_scheduler.ReduceLROnPlateau(optimizer))
        scheduler = by_hand(optimizer)
        worker.follow(scheduler)
        loss_of(model, batches(1)[0]).backward()
        optimizer.step()
        scheduler.step()
        with pytest.raises(pl.UsageError, match="step the one that it returned"):
            optimizer.step()
    with pytest.raises(pl.UsageError, match="inside `with"):
        pl.simulate(lambda: pl.attach(model, optimizer).follow(scheduler), workers=1)


def test_a_schedule_that_the_loop_gives_its_position_is_refused():
    model, optimizer = made()
    with pl.attach(model, optimizer) as worker:
        scheduler = worker.follow(lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2))
        with pytest.raises(pl.UsageError, match="gives the scheduler its position"):
            scheduler.step(0.5)


def per_epoch(optimizer):
    return lr_scheduler.StepLR(optimizer, 2)


def stepped(schedule, every, use=lambda worker: None):
    def loop():
        model, optimizer = made()
        scheduler = schedule(optimizer)
        with pl.attach(model, optimizer) as worker:
            for number, x in enumerate(batches(TOTAL), start=1):
                optimizer.zero_grad()
                loss = loss_of(model, x)
                loss.backward()
                optimizer.step()
                use(worker)
                if number % every == 0:
                    scheduler.step(*([loss.item()] if schedule is lr_scheduler.ReduceLROnPlateau else []))

    return loop


@pytest.mark.parametrize(
    ("algorithm", "schedule"),
    [(one, by_hand) for one in families.ALL]
    + [("hogwild", one) for one in (one_cycle, warm_up_and_cosine, lambda one: lr_scheduler.MultiStepLR(one, [20]))],
)
def test_a_schedule_that_is_stepped_per_step_is_warned_of_once(algorithm, schedule):
    with pytest.warns(UserWarning, match=PER_STEP) as caught:
        pl.simulate(stepped(schedule, 1), workers=2, algorithm=algorithm)
    assert len([one for one in caught if PER_STEP in str(one.message)]) == 1


def test_schedules_that_end_where_they_should_are_not():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pl.simulate(stepped(per_epoch, 4), workers=2, algorithm="hogwild")
        pl.simulate(stepped(lr_scheduler.ReduceLROnPlateau, 1), workers=2, algorithm="hogwild")
        pl.simulate(stepped(one_cycle, 1), workers=1, algorithm="hogwild")
        pl.simulate(stepped(one_cycle, 1, lambda worker: worker.progress), workers=2, algorithm="hogwild")


def test_a_learning_rate_of_ones_own_by_progress():
    kept = {}

    def loop():
        model, optimizer = made()
        with pl.attach(model, optimizer) as worker:
            while worker.progress < TOTAL * 4:
                step = worker.progress / 4
                optimizer.param_groups[0]["lr"] = 0.05 * (1 + math.cos(math.pi * step / TOTAL))
                optimizer.zero_grad()
                loss_of(model, torch.ones(4, 6) * own_id()).backward()
                optimizer.step()
            kept[own_id()] = worker.progress, rate(optimizer)

    pl.simulate(loop, workers=3, algorithm="hogwild")
    for samples, last in kept.values():
        assert TOTAL * 4 <= samples <= (TOTAL + 2) * 4
        assert last < 0.01


@pytest.mark.parametrize("algorithm", ["hogwild", "all-reduce", "parameter-server(mode=async)"])
def test_a_resumed_run_goes_on_where_its_schedule_was(algorithm, tmp_path):
    data = torch.utils.data.DataLoader(torch.cat(batches(TOTAL // 2, worker=9)), batch_size=4)
    kept = []

    def loop(epochs):
        def train():
            model, optimizer = made()
            scheduler = by_hand(optimizer)
            with pl.attach(model, optimizer) as worker:
                worker.follow(scheduler)
                for _ in range(epochs):
                    for x in worker.batches(data):
                        kept.append((rate(optimizer), worker.progress))
                        optimizer.zero_grad()
                        loss_of(model, x).backward()
                        optimizer.step()

        return train

    options = {"workers": 2, "algorithm": algorithm, "backend": "threads"}
    pl.launch(loop(1), out=tmp_path / "run", **options)
    kept.clear()
    pl.launch(loop(2), resume=tmp_path / "run", **options)
    _, rates = plain(by_hand, batches(TOTAL, worker=9))
    assert kept[0] == (pytest.approx(rates[TOTAL // 2]), 4 * (TOTAL // 2))
    assert max(samples for _, samples in kept) in (4 * (TOTAL - 1), 4 * (TOTAL - 2))  # before the last steps
    assert min(rate for rate, _ in kept) in (pytest.approx(rates[TOTAL - 1]), pytest.approx(rates[TOTAL - 2]))


def in_two_parts(schedule, folder, *, per_batch, workers=1):
    """One epoch, and then a resumed run of two."""
    data = torch.utils.data.DataLoader(torch.cat(batches(20, worker=9)), batch_size=4)

    def train(epochs):
        def loop():
            model, optimizer = made()
            scheduler = schedule(optimizer)
            with pl.attach(model, optimizer) as worker:
                for _ in range(epochs):
                    for x in worker.batches(data):
                        optimizer.zero_grad()
                        loss_of(model, x).backward()
                        optimizer.step()
                        if per_batch:
                            scheduler.step()
                    if not per_batch:
                        scheduler.step(1.0)

        return loop

    options = {"workers": workers, "algorithm": "lockstep", "backend": "threads"}
    pl.launch(train(1), out=folder, **options)
    pl.launch(train(2), resume=folder, **options)


def test_a_schedule_of_one_worker_that_begins_anew_in_a_resumed_run_is_warned_of(tmp_path):
    with pytest.warns(UserWarning, match="begins anew in this resumed run"):
        in_two_parts(by_hand, tmp_path, per_batch=True)


def test_a_plateau_that_counts_skipped_epochs_is_warned_of_once(tmp_path):
    with pytest.warns(UserWarning, match="went through without batches") as caught:
        in_two_parts(lr_scheduler.ReduceLROnPlateau, tmp_path, per_batch=False, workers=2)
    assert len([one for one in caught if "went through without batches" in str(one.message)]) == 1


def test_progress_where_workers_share_no_memory():
    def progress(lockstep):
        return RunProgress(worker_id=1, num_workers=3, lockstep=lockstep, table=None)

    own = progress(lockstep=False)
    own.add(own=4, together=0)
    assert (own.steps, own.samples) == (3, 12)  # the others are taken to be as fast
    by_number = progress(lockstep=False)
    for number in (1, 3, 10):  # this worker is slower
        by_number.hand_out(number)
        by_number.add(own=4, together=0)
    assert (by_number.steps, by_number.samples) == (11, 44)
    accumulating = progress(lockstep=False)
    for number in (1, 3, 5, 11):
        accumulating.hand_out(number)
    accumulating.add(own=8, together=0)
    accumulating.add(own=8, together=0)
    assert (accumulating.steps, accumulating.samples) == (6, 48)
    resumed = progress(lockstep=True)
    resumed.begin_at(30, 120)
    for _ in range(2):
        resumed.hand_out_round(3, 12)
    resumed.add(own=8, together=0)
    assert (resumed.steps, resumed.samples) == (33, 144)
