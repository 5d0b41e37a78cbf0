"""Evaluations by words of a run's memory: what comes back is what was found, or what failed."""

import math
import time

import pytest
import torch
from torch import nn

import forked
from paceline.algorithms import registry
from paceline.errors import UsageError
from paceline.memory.arena import Arena, plan_arena
from paceline.memory.segment import Segment
from paceline.worker.evaluation_channel import THREAD, EvaluationChannel
from paceline.worker.evaluator import Evaluator


@pytest.fixture
def asked():
    """Asks for one evaluation by this function, and gives its result."""
    threads = []

    def ask(figures):
        model = nn.Linear(1, 1)
        evaluator = Evaluator(model, figures)
        needs = registry.build("locked").needs
        plan = plan_arena(
            needs, num_workers=1, num_elements=evaluator._x.numel(), dtype=torch.float32, extra=EvaluationChannel.EXTRA
        )
        arena = Arena(Segment.create(plan.size_bytes), plan, participant_id=1)
        arena.shared.initialise(torch.ones_like(evaluator._x), 7)
        channel = EvaluationChannel.of(arena)
        threads.append((channel, channel.serve_in_thread(arena, evaluator)))
        assert channel.process == THREAD
        assert not channel.busy
        channel.ask()
        while channel.busy:
            time.sleep(0.001)
        return channel.result()

    yield ask
    for channel, thread in threads:
        channel.end()
        thread.join(forked.AGAINST_HANGS_S)
        assert not thread.is_alive()


def test_figures_come_back_as_they_were_found(asked):
    began_s = time.monotonic()
    result = asked(lambda model: {"loss": model.weight.item() / 3, "accuracy": None})
    assert result.figures == {"version": 7, "test_loss": 1 / 3, "test_accuracy": None}
    assert began_s <= result.at_s <= time.monotonic()
    assert result.finite
    assert result.failure == ""


def test_a_loss_that_is_no_number_is_not_one_that_is_not_known(asked):
    assert math.isnan(asked(lambda model: {"loss": math.nan, "accuracy": 0.5}).figures["test_loss"])


def test_what_a_user_can_put_right_is_told_from_what_was_raised(asked):
    def wrong(model):
        raise UsageError("evaluate returned 3 as accuracy")

    result = asked(wrong)
    assert (result.figures, result.failure, result.reason) == (None, "usage", "evaluate returned 3 as accuracy")


def test_a_failure_is_named_however_long_its_text(asked):
    def fails(model):
        raise KeyError("\x01\U0001f600" * 50_000)

    result = asked(fails)
    assert result.failure == "error"
    assert result.reason.startswith("evaluate raised KeyError: '")
    assert "test_channel.py" in result.trace or len(result.trace) > 1000
