"""What tests of all folders share: one thread per operation, the fork server, and a look at what is left behind."""

import gc
import os
from multiprocessing import forkserver
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from tqdm import tqdm

import forked
import leftovers
import small_plotly
from paceline.algorithms import backoff_registry, registry, step_size_registry
from paceline.algorithms.server.registries import apply_registry, delay_registry, mode_registry
from paceline.algorithms.topology import topology_registry
from paceline.compression.registry import codec_registry
from paceline.data.plan import partition_registry
from paceline.memory.placement import placement_registry
from paceline.model_parallel.layouts import layout_registry
from paceline.optim.outer import outer_registry
from paceline.simulator.compute import compute_registry

gc.disable()  # until all tests are collected: these are a million objects that stay
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

REGISTRIES = (
    apply_registry, backoff_registry, codec_registry, compute_registry, delay_registry, layout_registry, mode_registry,
    outer_registry, partition_registry, placement_registry, registry, step_size_registry, topology_registry,
)  # fmt: skip

FOLDER = Path(__file__).parent
# The files that take longest come first, so that no process is left with one of them when the others are done.
LONGEST = [
    FOLDER / name
    for name in (
        "processes/test_survivors.py",
        "loops/test_table.py",
        "processes/test_local_survivors.py",
        "processes/test_kill.py",
        "processes/test_torchrun.py",
        "processes/test_join_rounds.py",
        "documentation/test_pages.py",
        "model_parallel/tensor/test_run.py",
        "processes/test_join_d_psgd.py",
        "processes/test_table.py",
        "processes/test_replay.py",
        "processes/test_replay_loops.py",
        "processes/test_blame.py",
        "contracts/test_resume.py",
        "transport/test_message_collectives.py",
        "processes/test_step_checkpoints.py",
        "processes/test_join_hosts.py",
        "documentation/test_examples.py",
        "model_parallel/tensor/test_run_gloo.py",
        "processes/test_starts.py",
        "processes/test_ends.py",
        "processes/test_join.py",
        "processes/test_output.py",
        "model_parallel/test_losses.py",
        "processes/test_signals.py",
        "composition/test_drawn.py",
        "contracts/test_counts.py",
        "contracts/test_stops.py",
        "run/test_replay.py",
        "run/test_replay_servers.py",
        "system/test_full_disk.py",
        "run/test_train.py",
        "loops/test_outside_changes.py",
        "transport/test_message_views.py",
        "contracts/test_one_worker.py",
        "processes/test_refusals.py",
        "processes/test_calibrate_cluster.py",
        "model_parallel/test_failures.py",
        "loops/test_public.py",
        "documentation/test_site.py",
        "processes/test_loader_processes.py",
        "transport/test_mailbox.py",
        "model_parallel/test_equal.py",
        "model_parallel/tensor/test_losses.py",
        "model_parallel/tensor/test_run_traffic.py",
        "loops/test_schedules.py",
        "model_parallel/tensor/test_example.py",
        "model_parallel/test_plan.py",
        "contracts/test_updates.py",
        "contracts/test_replayable.py",
        "loops/test_samplers.py",
        "processes/test_supervisor_ends.py",
        "processes/test_mailbox.py",
        "model_parallel/test_placers.py",
        "loops/test_several_optimizers.py",
        "processes/test_server_copies.py",
        "model_parallel/test_place_verb.py",
        "model_parallel/tensor/test_gloo.py",
        "loop/test_missing_gradients.py",
        "contracts/test_lockstep.py",
        "fuzz/test_command_lines.py",
        "contracts/test_contention.py",
        "processes/test_attack.py",
        "algorithms/test_coded_all_reduce.py",
        "processes/test_servers.py",
        "tasks/test_built_in.py",
        "worker/test_attach.py",
        "composition/test_layouts.py",
        "documentation/test_readme.py",
        "simulator/test_simulated_backward.py",
        "model_parallel/tensor/test_equal.py",
        "processes/test_slow.py",
        "worker/test_uneven_epochs.py",
        "advice/test_communication.py",
        "processes/test_shares.py",
        "benchmarks/test_shared_memory.py",
        "simulator/test_gossip.py",
        "damage/test_damaged_files.py",
        "processes/test_agents.py",
        "simulator/test_local_survivors.py",
        "processes/test_d_psgd_survivors.py",
        "simulator/test_algorithms.py",
        "simulator/test_d_psgd_survivors.py",
        "run/test_shares.py",
        "run/test_earlier_part.py",
        "simulator/test_repeatable.py",
        "damage/test_unfit_states.py",
        "simulator/test_parameter_server.py",
        "algorithms/test_gradient_weights.py",
        "run/test_launch.py",
        "algorithms/test_delayed.py",
        "benchmarks/test_all_reduce.py",
        "benchmarks/test_disciplines.py",
        "system/test_plain_files.py",
        "sparse_problems/test_command_line.py",
        "simulator/test_overlap.py",
        "simulator/test_survivors.py",
        "worker/test_imports.py",
    )
]


def pytest_collection_modifyitems(items):
    assert all(path.exists() for path in LONGEST)
    place = {path: number for number, path in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path, len(LONGEST)))


def pytest_collection_finish():
    """PyTorch and 15,700 tests are a million objects, which every full collection and every search for referrers would visit.

    They stay until the end anyway. A full collection takes a millisecond without them, and 300 with them.
    """
    gc.collect()
    gc.freeze()
    gc.enable()


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


@pytest.fixture(scope="module")
def plotly():
    """For reports that a browser opens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("plotly.offline.get_plotlyjs", small_plotly.itself)
        yield


@pytest.fixture(scope="module", autouse=True)
def _nothing_stays_registered():
    """What one file's tests register is nothing that those of another should find, in whatever process these are."""
    before = [each.names() for each in REGISTRIES]
    yield
    assert [each.names() for each in REGISTRIES] == before


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
