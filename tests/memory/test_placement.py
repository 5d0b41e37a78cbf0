import os

import pytest

from paceline.memory import numa as placement
from paceline.memory.numa import Node
from paceline.memory.segment import Segment


def test_nodes_are_read_as_the_kernel_lists_them(tmp_path):
    for name, cpus, kilobytes in (("node10", "", 0), ("node1", "4-7,12", 2048), ("node0", "0-3", 1024)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "cpulist").write_text(f"{cpus}\n")
        (folder / "meminfo").write_text(f"Node {name[4:]} MemTotal:       {kilobytes} kB\n")
    nodes = placement.numa_nodes(tmp_path)
    assert nodes == [Node(0, (0, 1, 2, 3), 1 << 20), Node(1, (4, 5, 6, 7, 12), 2 << 20), Node(10, (), 0)]


def test_a_system_without_the_list_has_one_node(tmp_path):
    (node,) = placement.numa_nodes(tmp_path)
    assert len(node.cpus) == os.cpu_count()
    assert node.memory_bytes > 1 << 20


def test_memory_is_placed_or_the_reason_is_said(monkeypatch):
    segment = Segment.create(1 << 20)
    first = placement.numa_nodes()[0].id
    for sentence in (
        placement.interleave(segment.address, segment.size_bytes),
        placement.bind(segment.address + 100, 5000, [first]),
    ):
        assert sentence.startswith(("Placed: ", "Not placed: "))
    monkeypatch.setattr(placement, "_SYS_MBIND", 100_000)
    assert "refused by the kernel (Function not implemented)" in placement.interleave(segment.address, 4096)
    monkeypatch.setattr(placement, "_SYS_MBIND", None)
    assert "which this system does not have" in placement.interleave(segment.address, 4096)
    with pytest.raises(ValueError, match="cannot bind memory to nodes"):
        placement.bind(segment.address, 4096, [9999])


@pytest.mark.parametrize(
    ("num_workers", "cpus", "shares"),
    [
        (1, (2, 3), [(2, 3)]),
        (2, (0, 1, 4, 5, 6), [(0, 1), (4, 5, 6)]),
        (3, (0, 1, 2), [(0,), (1,), (2,)]),
        (5, (0, 7), [(0,), (7,), (0,), (7,), (0,)]),
    ],
)
def test_every_worker_gets_its_share_of_the_cpus(monkeypatch, num_workers, cpus, shares):
    pinned = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda process, share: pinned.append(share))
    assert [placement.pin(worker, num_workers, cpus) for worker in range(num_workers)] == shares
    assert pinned == shares
