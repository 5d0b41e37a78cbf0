"""Each rule of the rounds of messages is needed: without it, a drawn run goes wrong, or one made by hand."""

import inspect
import sys
import textwrap

import pytest

from paceline.errors import WorkerLostError
from paceline.transport.message_collectives import MessageCollectives
from paceline.transport.quorum import Quorum
from paceline.transport.round_members import RoundMembers
from transport import test_quorum, test_round_members
from transport.test_message_collectives import check_runs, check_silences


def dying():
    """Workers die, and connections break."""
    for faults in (1, 2, 3):
        check_runs(3, faults)


def silent():
    """Some also cannot be reached for longer than the deadline."""
    for workers, faults in ((2, 1), (3, 1), (3, 3)):
        check_silences(workers, faults, runs=200)


HAS_RESULTS = "    if not self._hear_until(lambda: not [one for one in self._exchanges if not one.advance()]):\n"
VOTES = "    for other in self._next.others:\n        self._say(_VOTE, self._round, other)\n"

#: What goes wrong, the method, its text, and the text in its place.
MUTATIONS = {
    "no worker waits for votes": (
        dying,
        MessageCollectives._ends_by_votes,
        "return self._hear_until(lambda: all(key in self._received for key in keys))",
        "return True",
    ),
    "a worker votes before it has the result": (
        dying,
        MessageCollectives._ends_by_votes,
        HAS_RESULTS,
        VOTES + HAS_RESULTS,
    ),
    "a round is repeated although another worker has ended it": (
        dying,
        MessageCollectives._is_over,
        "return is_behind or (",
        "return (",
    ),
    "an earlier ballot agrees": (
        dying,
        RoundMembers.is_agreed,
        "(self._told[one].view, self._told_living[one]) == (self.proposed, living)",
        "self._told_living[one] == living",
    ),
    "views begin although their members differ": (
        test_round_members.test_a_view_begins_once_the_others_have_agreed_to_leave_the_excluded_worker_out,
        RoundMembers.is_agreed,
        "(self._told[one].view, self._told_living[one]) == (self.proposed, living)",
        "self._told[one].view == self.proposed",
    ),
    "a worker that cannot be reached counts as dead": (
        silent,
        RoundMembers.absent,
        " if self._ends.has_ended(worker, incarnation)",
        "",
    ),
    "an excluded worker that leaves counts as dead": (
        test_round_members.test_an_excluded_worker_may_be_alive_even_if_it_says_bye,
        RoundMembers.leave,
        "Status.EXCLUDED if is_excluded else Status.GONE",
        "Status.GONE",
    ),
    "a majority is counted without the deaths of which it knows": (
        test_round_members.test_a_worker_does_not_go_on_without_a_majority_that_knows_of_a_death,
        RoundMembers._remains_without,
        "map(max, standings, self._standings)",
        "self._standings",
    ),
    "a worker counts deaths that only its accuser knows": (
        test_round_members.test_a_death_that_only_the_accuser_knows_gives_no_majority,
        RoundMembers._remains_without,
        "known = map(max, standings, self._standings)",
        "self._standings = list(map(max, standings[:1] + self._standings[1:], self._standings)); known = self._standings",
    ),
    "no majority is needed": (silent, Quorum.missing, "in self.views", "in ()"),
    "any half is a majority": (
        silent,
        Quorum.missing,
        "2 * len(votes) == len(voters) and votes[:1] != voters[:1]",
        "False",
    ),
    "a majority of the newest view is enough": (
        test_quorum.test_until_all_have_begun_a_view_the_one_before_counts_too,
        Quorum.begin,
        "self.views.append(members)",
        "self.views = [members]",
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_without_a_rule_a_run_goes_wrong(name, monkeypatch):
    runs, method, old, new = MUTATIONS[name]
    source = textwrap.dedent(inspect.getsource(method))
    assert source.count(old) == 1
    module = sys.modules[method.__module__]
    mutated = {}
    exec("from __future__ import annotations\n" + source.replace(old, new), vars(module), mutated)
    owner = getattr(module, method.__qualname__.partition(".")[0])
    monkeypatch.setattr(owner, method.__name__, mutated[method.__name__])
    with pytest.raises((AssertionError, WorkerLostError)):
        runs()
