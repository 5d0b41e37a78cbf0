"""The store in a run's memory: what is set is read, in any process; what is half-written is not there."""

import pytest

import paceline as pl
from paceline.memory.segment import Layout, Segment
from paceline.memory.shared_store import SharedStore

MEMBERS = 3


@pytest.fixture
def stores():
    """Two members' views of one store, which begins in the middle of the memory."""
    layout = Layout()
    layout.words("before", 3)
    offset = SharedStore.reserve(layout, MEMBERS)
    layout.words("after", 1)
    segment = Segment.create(layout.size_bytes)
    segment.mapping[layout.offsets["before"] : offset] = 255
    segment.mapping[layout.offsets["after"] :] = 255
    yield SharedStore(segment, offset, MEMBERS), SharedStore(segment, offset, MEMBERS)
    assert (segment.mapping[layout.offsets["before"] : offset] == 255).all()
    assert (segment.mapping[layout.offsets["after"] :] == 255).all()
    segment.close()


KEYS = [f"{what}/{member}" for what in ("peer", "ended") for member in range(MEMBERS)]


def test_what_is_set_is_read_and_replaced(stores):
    mine, other = stores
    assert not any(other.check([key]) for key in KEYS)
    for key in KEYS:
        mine.set(key, f"0 {key}")
    for key in KEYS:
        assert other.get(key) == f"0 {key}".encode()
    other.set("peer/1", "1 x")
    assert mine.get("peer/1") == b"1 x"
    assert mine.check(KEYS)
    with pytest.raises(RuntimeError, match="peer/2"):
        SharedStore(Segment.create(SharedStore.size_bytes(MEMBERS)), 0, MEMBERS).get("peer/2")


def test_all_learn_one_name_of_the_run(stores):
    mine, other = stores
    with pytest.raises(RuntimeError):
        mine.compare_set("run", "", "my own")
    mine.begin()
    name = mine.compare_set("run", "", "my own")
    assert name == other.compare_set("run", "", "its own")
    assert len(name) == 16


@pytest.mark.parametrize("num_bytes", [1, 5, 8, 20])
def test_a_value_that_a_killed_writer_left_half_written_is_not_there(stores, num_bytes):
    """As many bytes of the new one as it came to; the next incarnation's is whole again."""
    mine, other = stores
    mine.set("peer/0", "0 tcp://127.0.0.1:40001")
    before = bytes(mine._bytes)
    mine.set("peer/0", "1 tcp://127.0.0.1:52222")
    start = mine._starts["peer/0"]
    mine._bytes[start + num_bytes : start + 60] = before[start + num_bytes : start + 60]
    assert not other.check(["peer/0"])
    mine.set("peer/0", "2 tcp://127.0.0.1:3")
    assert other.get("peer/0") == b"2 tcp://127.0.0.1:3"


def test_a_value_that_does_not_fit_is_refused(stores):
    longest = "x" * 186
    stores[0].set("peer/2", longest)
    assert stores[1].get("peer/2") == longest.encode()
    with pytest.raises(ValueError, match="more than 186 characters"):
        stores[0].set("peer/2", longest + "x")


def test_a_launched_run_asks_no_name_server(monkeypatch):
    """A TCPStore would, for every connection; so nobody makes one."""

    def asked(*_, **__):
        raise AssertionError("a TCPStore")

    monkeypatch.setattr("torch.distributed.TCPStore", asked)
    config = {"task": "digits-mlp", "workers": 3, "steps": 5, "backend": "threads"}
    for algorithm in ("ad-psgd", "parameter-server(shards=2)"):
        assert pl.train(pl.TrainConfig(algorithm=algorithm, **config)).result["outcome"] == "stopped"
