"""What containers grant, and where temporary files go."""

import tempfile

import pytest

import paceline as pl
from paceline.system import limits


@pytest.fixture
def group(tmp_path, monkeypatch):
    """Writes the settings of control groups: this process's, and by path."""
    monkeypatch.setattr(limits, "_CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(limits, "_OWN_CGROUPS", tmp_path / "own")

    def write(own, settings):
        (tmp_path / "own").write_text(own)
        for path, text in settings.items():
            file = tmp_path / "cgroup" / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{text}\n")

    return write


def test_the_tightest_limit_of_a_group_and_those_around_it_counts(group):
    group(
        "0::/service/one\n",
        {
            "cpu.max": "max 100000",
            "memory.max": "max",
            "service/cpu.max": "50000 100000",
            "service/memory.max": 2**30,
            "service/one/cpu.max": "150000 100000",
            "service/one/memory.max": "max",
        },
    )
    assert (limits.cpu_quota(), limits.memory_limit()) == (0.5, 2**30)


def test_a_container_sees_its_own_group_as_the_root(group):
    group("0::/docker/1234\n", {"cpu.max": "200000 100000", "memory.max": 2**31})
    assert (limits.cpu_quota(), limits.memory_limit()) == (2, 2**31)


def test_version_1(group):
    files = {
        "cpu,cpuacct/cpu.cfs_quota_us": -1,
        "cpu,cpuacct/cpu.cfs_period_us": 100_000,
        "cpu,cpuacct/small/cpu.cfs_quota_us": 25_000,
        "cpu,cpuacct/small/cpu.cfs_period_us": 100_000,
        "memory/memory.limit_in_bytes": 2**63 - 4096,
        "memory/small/memory.limit_in_bytes": 2**28,
    }
    group("4:memory:/small\n3:cpu,cpuacct:/small\n1:name=systemd:/\n0::/\n", files)
    assert (limits.cpu_quota(), limits.memory_limit()) == (0.25, 2**28)


def test_no_limits(group):
    group("4:memory:/\n0::/\n", {"memory/memory.limit_in_bytes": 2**63 - 4096, "cpu.max": "max 100000"})
    assert (limits.cpu_quota(), limits.memory_limit()) == (None, None)


def test_without_a_folder_for_temporary_files_a_run_is_refused(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/nowhere"])
    with pytest.raises(pl.UsageError, match="name one in the environment variable TMPDIR"):
        limits.temporary_folder()
