"""Workers, as threads, that do something together: all hear of a failure, and of whose."""

import threading
from contextlib import ExitStack

import pytest
import torch
from torch.distributed import HashStore

import forked
import leftovers
from paceline.advice.calibration.gather import WorkerGroup
from paceline.errors import PacelineError, UsageError, WorkerLostError
from paceline.ports.ports import Message, PeerLeft
from paceline.transport.mailbox import ZmqMailbox

DEADLINE_S = forked.AGAINST_HANGS_S


@pytest.fixture(autouse=True)
def _nothing_left():
    before = leftovers.everything()
    yield
    leftovers.assert_nothing_new(before)


def run(number, work, deadline_s=DEADLINE_S):
    """What `work(group)` returns or raises in each worker."""
    found = [None] * number
    with ExitStack() as stack:
        store = HashStore()
        mailboxes = [ZmqMailbox(store, worker, number) for worker in range(number)]

        def one(worker):
            with mailboxes[worker] as mailbox:
                mailbox.connect(DEADLINE_S)
                group = WorkerGroup(mailbox, worker, number, deadline_s)
                try:
                    with group.fail_together():
                        found[worker] = work(group)
                except PacelineError as error:
                    found[worker] = error

        for mailbox in mailboxes:
            stack.callback(mailbox.close)
        threads = [threading.Thread(target=one, args=(worker,)) for worker in range(number)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
    return found


@pytest.mark.parametrize("number", [1, 2, 3, 5])
def test_all_tell_and_are_told(number):
    def work(group):
        gathered = group.gather({"me": group.worker_id, "text": "\u00e4"})
        group.meet()
        return group.tell(gathered), group.gather([group.worker_id])

    everything = [{"me": worker, "text": "\u00e4"} for worker in range(number)]
    numbers = [[worker] for worker in range(number)]
    assert run(number, work) == [(everything, numbers), *[(everything, [])] * (number - 1)]


@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_one_workers_mistake_ends_all_in_its_words(culprit):
    def work(group):
        group.meet()
        if group.worker_id == culprit:
            raise UsageError("There is no data here.")
        group.meet()

    found = run(3, work)
    assert all(isinstance(error, UsageError) for error in found)
    named = "" if culprit == 0 else f"Worker {culprit}: "
    expected = [f"{named}There is no data here."] * 3
    expected[culprit] = "There is no data here."
    assert [str(error) for error in found] == expected


def test_a_worker_that_leaves_is_named_by_all_alike_also_by_one_that_lost_it_first():
    """Worker 1 notices by itself that worker 2 has left, in the middle of something between the two."""
    lost = threading.Event()

    def work(group):
        group.meet()
        group.what = "measuring links"
        if group.worker_id == 2:
            group.mailbox.close()
            return "left"
        if group.worker_id == 1:
            left = group.mailbox.receive(DEADLINE_S, sender=2)
            lost.set()
            raise group.lost(left.peer, left.reason)
        assert lost.wait(DEADLINE_S)
        group.meet()

    found = run(3, work)
    assert found[2] == "left"
    for error in found[:2]:
        assert not isinstance(error, UsageError)
        assert str(error) == (
            "While measuring links: worker 2 left (it has ended). Nothing was written; start all workers again."
        )


def test_a_silent_worker_is_named_within_the_deadline():
    over = threading.Event()

    def work(group):
        if group.worker_id == 1:
            assert over.wait(DEADLINE_S)
            return "late"
        try:
            group.gather(None)
        finally:
            over.set()

    found = run(2, work, deadline_s=0.2)
    assert isinstance(found[0], WorkerLostError)
    assert "While starting: worker 1 did not answer within 0.2 s." in str(found[0])


def test_without_worker_0_nobody_waits():
    def work(group):
        group.meet()
        if group.worker_id == 0:
            group.mailbox.close()
            return
        group.tell()

    for error in run(3, work)[1:]:
        assert "worker 0 left (it has ended)" in str(error)


def test_a_worker_that_leaves_after_an_answer_is_missed_at_the_next():
    def work(group):
        if group.worker_id == 2:
            assert isinstance(group.mailbox.receive(DEADLINE_S, sender=1), PeerLeft)
        group.gather(None)
        if group.worker_id == 1:
            group.mailbox.close()
            return
        group.gather(None)
        group.tell()

    found = run(3, work)
    assert "worker 1 left" in str(found[0])
    assert str(found[2]) == str(found[0])


def test_a_worker_that_was_busy_when_worker_0_ended_hears_why():
    """Worker 0 has said what was wrong, and left, before worker 1 tells it anything."""
    over = threading.Event()

    def work(group):
        if group.worker_id == 0:
            over.set()
            raise WorkerLostError("Worker 2 is gone.")
        assert over.wait(DEADLINE_S)
        while group.mailbox.peers():
            over.wait(0.001)
            group.mailbox.receive(0.0, kind="never")
        group.gather(None)

    assert [str(error) for error in run(2, work)] == ["Worker 2 is gone."] * 2


# What a peer says that makes no sense is thrown away, as the right words may follow

NONSENSE = [None, b"", b"{", b"\xff", b"[" * 9999, b"null", b"{}", b'"words"', b'{"sentence": 3, "usage": 1, "of": []}']


def number_of(worker, words):
    if type(words) is not int:
        raise ValueError("no number")
    return words


def say_nonsense(group, to, kind):
    for one in NONSENSE:
        group.mailbox.send(to, Message(kind, x=None if one is None else torch.tensor(list(one), dtype=torch.uint8)))
    group.mailbox.send(to, Message(kind, x=torch.ones(3)))


@pytest.mark.parametrize("culprit", [0, 1, 2])
@pytest.mark.parametrize("kind", ["answer 1", "word 2", "failed"])
def test_nonsense_of_one_worker_ends_nothing(culprit, kind):
    def work(group):
        if group.worker_id == culprit:
            for other in {0, 1, 2} - {culprit}:
                say_nonsense(group, other, kind)
        gathered = group.gather(10 + group.worker_id, number_of)
        return gathered, group.tell(7, number_of)

    assert run(3, work) == [([10, 11, 12], 7), ([], 7), ([], 7)]


@pytest.mark.parametrize("culprit", [0, 1])
def test_whose_words_make_no_sense_is_named_within_the_deadline(culprit):
    over = threading.Event()

    def work(group):
        group.what = "measuring steps"
        group.meet()
        group.deadline_s = 0.5  # from when all that makes no sense has come
        if group.worker_id == culprit:
            say_nonsense(group, 1 - culprit, "word 3" if culprit == 0 else "answer 3")
            group.mailbox.send(1 - culprit, Message("said"))
            assert over.wait(DEADLINE_S)
            return "culprit"
        assert group.mailbox.receive(DEADLINE_S, kind="said", sender=culprit).message.kind == "said"
        try:
            return group.tell(read=number_of) if culprit == 0 else group.gather(1, number_of)
        finally:
            over.set()

    found = run(2, work)
    named = (
        "worker 0 sent no valid message for 0.5 s"
        if culprit == 0
        else ("worker 1 did not answer within 0.5 s, and worker 1 sent a malformed message")
    )
    assert str(found[1 - culprit]) == f"While measuring steps: {named}. Nothing was written; start all workers again."
