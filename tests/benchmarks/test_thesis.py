"""What the simulated thesis says of placements: a claim that holds can also fail."""

import importlib
from pathlib import Path

import pytest

FIDELITY = Path(__file__).parents[2] / "benchmarks" / "fidelity"


class _MadeUp:
    """Runs whose updates per second are given: those of two sockets, times one's, by batch; None: only reads memory."""

    def __init__(self, gains):
        self._gains = gains

    def timed(self, algorithm, workers, batch_size, *, placement):
        gain = 1.0 if placement == "one socket" else self._gains[batch_size]
        return {"updates_per_s": 228.0 * gain}


@pytest.fixture
def thesis(monkeypatch):
    monkeypatch.syspath_prepend(str(FIDELITY))
    return importlib.import_module("thesis")


@pytest.mark.parametrize(("papers_gain", "holds"), [(1.0, False), (1.5, True)])
def test_what_two_sockets_gain_is_claimed_of_the_papers_batch_only(thesis, papers_gain, holds):
    """With twice the bandwidth, a load that only reads memory is faster whatever the method."""
    claims = thesis.studies.memory(_MadeUp({16: 1.0, 512: papers_gain, None: 2.0})).claims
    verdicts = {name: verdict for name, verdict, _ in claims}
    for what in ("locks", "lock-free methods"):
        assert verdicts[f"{thesis.studies.TWO_SOCKETS}: {what}"] == thesis.studies.BY_CONSTRUCTION
        assert verdicts[f"{thesis.studies.TWO_SOCKETS_BATCH}: {what}"] is holds
    assert not {name for name in verdicts if name in thesis.MUST}
    says = next(says for name, _, says in claims if name == f"{thesis.studies.TWO_SOCKETS}: locks")
    assert f"{228 * papers_gain:,.0f} against 228" in says
    assert all(name in thesis.WHY for name in verdicts)
