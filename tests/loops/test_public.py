"""The loops in the manner of PyTorch's examples: a small run of each, alone and simulated, and the page that shows them."""

import inspect
from functools import cache

import pytest

import paceline as pl
from loops import public, public_page
from loops.coder import own_id
from loops.families import ALL
from loops.habits import plain_attach
from paceline.tasks import load_task
from paceline.tasks.base import keep_data

SHARE = 0.4  # of what the plain loop learns, with half as many updates or with stale ones
QUICK = {
    "mnist": "parameter-server(mode=async)",
    "word_language_model": "local-sgd(period=3)",
    "vae": "hogwild",
    "imagenet": "ad-psgd",
    "dcgan": "leashed",
    "reinforce": "all-reduce",
}


@cache
def plainly(name, size):
    """What the plain loop has left to learn before it begins, and at its end."""
    settings = public.module_of(name).SIZES[size]
    untrained = public.run(name, plain_attach, settings | {public.length_of(settings): 0})
    trained = public.run(name, plain_attach, settings)
    assert trained < 0.8 * untrained, "or nothing could be asked of other runs"
    return untrained, trained


def test_data_that_other_tests_have_too_stay_as_they_are():
    with keep_data():
        kept = load_task("digits-mlp").load()
        assert public.datasets(None, 10)[0][0][0].shape == (1, 8, 8)
        assert [one.tensors[0].shape for one in kept] == [(1437, 64), (360, 64)]


@pytest.mark.parametrize("name", public.NAMES)
def test_alone_it_is_plain_pytorch(name):
    settings = public.module_of(name).SIZES["quick"]
    assert public.run(name, pl.attach, settings) == plainly(name, "quick")[1]


@pytest.mark.parametrize(("name", "algorithm"), QUICK.items())
def test_two_simulated_workers(name, algorithm):
    untrained, trained = plainly(name, "quick")
    left = {}

    def body():
        left[own_id()] = public.run(name, pl.attach, public.module_of(name).SIZES["quick"])

    run = pl.simulate(body, workers=2, algorithm=algorithm)
    assert run.result["outcome"] == "stopped"
    assert len(left) == 2
    assert max(left.values()) < untrained - SHARE * (untrained - trained), (untrained, trained)


def test_every_loop_has_a_quick_cell():
    assert set(QUICK) == set(public.NAMES)


def test_what_takes_one_optimizer_refuses_the_two_models_in_turn():
    assert set(public.REPRESENTATIVES) <= set(ALL)
    with pytest.raises(pl.UsageError, match="takes one optimizer, but attach was given 2"):
        pl.simulate(
            lambda: public.run("dcgan", pl.attach, public.module_of("dcgan").SIZES["quick"]),
            workers=2,
            algorithm="ad-psgd",
        )


@pytest.mark.parametrize("name", public.NAMES)
def test_what_the_page_says_that_a_loop_takes_is_in_the_loop(name):
    module = public.module_of(name)
    source = inspect.getsource(module.loop)
    for line in module.TAKES:
        assert line in source, line


def test_the_page_shows_the_loops():
    written = public_page.PAGE.read_text(encoding="utf-8")
    assert public_page.rendered() == written, "python -m loops.public_page, in the folder of tests, writes it"
