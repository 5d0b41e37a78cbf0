"""What tests of all folders share: one thread per operation, the fork server, and a look at what is left behind."""

import os
from multiprocessing import forkserver
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from tqdm import tqdm

import forked
import leftovers

# Whichever test starts this process's fork server, what it has loaded is the same: it stays for all tests that follow.
forkserver.set_forkserver_preload(list(forked.PRELOAD))
forkserver.set_forkserver_preload = lambda modules: None
# A TCPStore asks a name server about every connection; where none answers, this is how long it waits.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
tqdm.monitor_interval = 0  # no thread that looks after forgotten progress bars

# An example may take 200 ms by default, and drawing it as long as others': on a busy machine neither says anything. The
# same examples in every run.
settings.register_profile("paceline", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("paceline")

FOLDER = Path(__file__).parent
# The files that take longest come first, so that no process is left with one of them when the others are done.
LONGEST = [
    FOLDER / name
    for name in (
        "loops/test_table.py",
        "processes/test_table.py",
        "contracts/test_resume.py",
        "processes/test_kill.py",
        "processes/test_torchrun.py",
        "documentation/test_examples.py",
        "documentation/test_pages.py",
        "documentation/test_site.py",
        "processes/test_supervisor_ends.py",
        "processes/test_join.py",
        "contracts/test_counts.py",
        "contracts/test_updates.py",
        "contracts/test_one_worker.py",
        "contracts/test_contention.py",
        "processes/test_servers.py",
        "processes/test_server_copies.py",
        "run/test_train.py",
        "worker/test_attach.py",
        "processes/test_mailbox.py",
        "processes/test_join_hosts.py",
        "processes/test_calibrate_cluster.py",
        "simulator/test_algorithms.py",
        "simulator/test_gossip.py",
        "simulator/test_repeatable.py",
        "tasks/test_built_in.py",
    )
]


def pytest_collection_modifyitems(items):
    assert all(path.exists() for path in LONGEST)
    place = {path: number for number, path in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path, len(LONGEST)))


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    """Two test processes, each with a thread per core, would wait for each other's; and they may round otherwise."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _own_runtime_folder(tmp_path_factory):
    """Where runs that stay on this machine keep their key."""
    folder = tmp_path_factory.mktemp("runtime")
    folder.chmod(0o700)
    os.environ["XDG_RUNTIME_DIR"] = str(folder)


@pytest.fixture(scope="session")
def fork_server():
    import paceline.run.train  # noqa: F401  (before the collector is told that what is loaded stays)
    from paceline.tasks.load import load_task

    load_task("digits-mlp").load()
    leftovers.start_fork_server()


@pytest.fixture
def nothing_left(fork_server):
    before = leftovers.everything()
    yield
    leftovers.assert_nothing_new(before)
