"""`paceline launch`: agents on (what stands for) two machines, each with workers of its own."""

import contextlib
import json
import os
import re
import signal

import pytest

import forked
import leftovers
from paceline.membership.join_point import JoinPoint
from paceline.records.run_data import RunData
from processes.join_programs import free_address

SCRIPT = """
import json, os, pathlib, sys, time
import torch
from torch import nn
import paceline as pl

assert os.environ["MALLOC_TRIM_THRESHOLD_"] == os.environ["MALLOC_MMAP_THRESHOLD_"] == str(1 << 30)
folder = pathlib.Path(sys.argv[1])
torch.manual_seed(os.getpid())
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with pl.attach(model, optimizer, sys.argv[2]) as worker:
    (folder / f"in-{worker.worker_id}-{os.getpid()}").write_text(os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    steps = 0
    for _ in range(1_000_000):
        is_done = (folder / "done").exists()
        if worker.sum(int(is_done)) if sys.argv[2] != "ad-psgd" else is_done:  # in rounds all end together
            break
        for _ in worker.batches(list(range(64))):
            optimizer.zero_grad()
            loss = (model(torch.randn(4, 8)) - 1).square().mean()
            loss.backward()
            optimizer.step()
            worker.report(loss)
            steps += 1
            time.sleep(0.002)
            if steps % 50 == 0:
                (folder / f"steps-{os.getpid()}-{steps}").touch()
(folder / f"out-{worker.worker_id}").write_text(json.dumps([p.tolist() for p in model.parameters()]))
"""


class Machines:
    """Agents and their workers, none of which is left behind."""

    def __init__(self, folder, algorithm):
        self.folder, self.algorithm = folder, algorithm
        self.agents = []
        (folder / "script.py").write_text(SCRIPT)

    def launch(self, name, *options):
        words = ["launch", *options, "--out", name, "--json", "--", "script.py", self.folder, self.algorithm]
        agent = forked.Python(["-m", "paceline", *words], self.folder)
        self.agents.append(agent)
        return agent

    def workers(self):
        """worker id -> process id, of the newest of each."""
        found = sorted((path.stat().st_mtime_ns, path.name) for path in self.folder.glob("in-*"))
        return {int(name.split("-")[1]): int(name.split("-")[2]) for _, name in found}

    def wait_for(self, pattern, number=1):
        leftovers.wait_until(lambda: len(list(self.folder.glob(pattern))) >= number, pattern)

    def steps(self, pid):
        """How many a worker has made, of which there is a file for every 50."""
        return max(int(path.name.split("-")[2]) for path in self.folder.glob(f"steps-{pid}-*"))

    def finish(self):
        (self.folder / "done").touch()

    def end(self):
        attached = {int(path.name.split("-")[2]) for path in self.folder.glob("in-*")}
        for pid in attached.union(*(leftovers.descendants(agent.pid) for agent in self.agents)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for agent in self.agents:
            agent.__exit__()


@pytest.fixture
def machines(tmp_path, request):
    machines = Machines(tmp_path, getattr(request, "param", "ad-psgd"))
    yield machines
    machines.end()


@pytest.mark.parametrize("machines", ["ad-psgd", "all-reduce", "d-psgd"], indirect=True)
def test_two_agents_one_is_killed_and_so_is_a_worker_of_the_other(machines):
    """The killed agent holds the join point; its workers go on without it."""
    address = free_address()
    first = machines.launch("first", "--join", address, "--workers", "2", "--of", "4", "--deadline", "590")
    leftovers.wait_until(lambda: list(machines.folder.glob("in-*")) or _listens(address), "the join point")
    second = machines.launch("second", "--join", address, "--workers", "2", "--deadline", "590")
    machines.wait_for("in-*", 4)
    machines.wait_for("steps-*-50", 4)
    written = {one["worker"]: one for one in map(_read, (machines.folder / "second").glob("worker-*.json"))}
    victim = max(written)
    first.kill()
    first.wait()  # its workers still write to its standard output
    os.kill(written[victim]["pid"], signal.SIGKILL)
    machines.wait_for("steps-*-250", 3)
    machines.finish()
    output, errors = second.communicate(forked.AGAINST_HANGS_S)
    assert second.returncode == 0, errors
    machines.wait_for("out-*", 3)
    models = {path.read_text() for path in machines.folder.glob("out-*")}
    assert len(models) == 1, "one model, also for the workers whose agent was killed"
    assert f"Worker {victim} was ended by signal 9." in errors
    result = json.loads(output.splitlines()[-1])
    (other,) = set(written) - {victim}
    assert (result["outcome"], result["workers"], result["workers_here"]) == ("stopped", 4, [other])
    assert result["workers_lost"] == [victim]
    assert result["models_in_mean"] == 3
    assert any("The join point is gone" in note for note in result["notes"]) == (machines.algorithm == "ad-psgd")
    rows = RunData.load(machines.folder / "second").records[other]
    if machines.algorithm == "d-psgd":  # a worker without a batch makes no step of its own
        rows = rows[rows["samples"] > 0]
    assert len(rows) == result["updates_per_worker"][other]
    for name in ("model.pt", "report.html", "trace.json"):
        assert (machines.folder / "second" / name).stat().st_size


@pytest.mark.parametrize("machines", ["ad-psgd", "all-reduce"], indirect=True)
def test_a_dead_worker_is_replaced_if_asked_for(machines, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    agent = machines.launch("run", "--workers", "2", "--restarts", "1", "--deadline", "590")
    machines.wait_for("steps-*-50", 2)
    victim = machines.workers()[0]
    os.kill(victim, signal.SIGKILL)
    machines.wait_for("in-0-*", 2)
    machines.wait_for(f"steps-{machines.workers()[0]}-50")
    machines.finish()
    output, errors = agent.communicate(forked.AGAINST_HANGS_S)
    assert agent.returncode == 0, errors
    assert "Worker 0 was ended by signal 9. Another one starts in its place." in errors
    result = json.loads(output.splitlines()[-1])
    assert (result["restarts"], result["workers_here"], result["models_in_mean"]) == (1, [0, 1], 2)
    gpu_of = {int(path.name.split("-")[2]): path.read_text() for path in machines.folder.glob("in-*")}
    successor, other = (machines.workers()[one] for one in (0, 1))
    assert gpu_of[victim] == gpu_of[successor]
    assert {gpu_of[successor], gpu_of[other]} == {"5", "7"}


@pytest.mark.parametrize("machines", ["all-reduce"], indirect=True)
def test_a_worker_that_was_cut_off_is_replaced(machines):
    agent = machines.launch("run", "--workers", "3", "--restarts", "1", "--deadline", "10")
    machines.wait_for("steps-*-50", 3)
    victim = machines.workers()[2]
    os.kill(victim, signal.SIGSTOP)
    machines.wait_for(f"steps-{machines.workers()[0]}-{50 * (machines.steps(machines.workers()[0]) // 50 + 2)}")
    os.kill(victim, signal.SIGCONT)
    machines.wait_for("in-2-*", 2)
    machines.wait_for(f"steps-{machines.workers()[2]}-50")
    machines.finish()
    output, errors = agent.communicate(forked.AGAINST_HANGS_S)
    assert agent.returncode == 0, errors
    assert re.search(r"Worker 2 was cut off from the others in round \d+: .* Another one starts in its place.", errors)
    result = json.loads(output.splitlines()[-1])
    assert (result["restarts"], result["workers_here"], result["models_in_mean"]) == (1, [0, 1, 2], 3)
    assert {*RunData.load(machines.folder / "run").records[2]["incarnation"]} == {0, 1}


@pytest.mark.parametrize("machines", ["ad-psgd"], indirect=True)
def test_a_note_says_where_a_worker_that_was_refused_says_why(machines):
    begins = "    for _ in range(1_000_000):\n"
    ends = "        if (folder / 'done').exists() and worker.worker_id == 1:\n            raise SystemExit(2)\n"
    (machines.folder / "script.py").write_text(SCRIPT.replace(begins, begins + ends))
    agent = machines.launch("run", "--workers", "2", "--deadline", "590")
    machines.wait_for("steps-*-50", 2)
    machines.finish()
    output, _ = agent.communicate(forked.AGAINST_HANGS_S)
    assert "Worker 1 ended with exit code 2: see its output." in json.loads(output.splitlines()[-1])["notes"]


@pytest.mark.parametrize("machines", ["all-reduce", "ad-psgd"], indirect=True)
def test_the_cause_and_the_steps_of_a_run_that_an_error_ends(machines):
    """Under ad-psgd the other worker goes on alone, and ends in order."""
    begins = "    for _ in range(1_000_000):\n"
    fails = "        if (folder / 'done').exists() and worker.worker_id == 1:\n            {}['label 17']\n"
    script = SCRIPT.replace(begins, begins + fails)
    (machines.folder / "script.py").write_text(script)
    agent = machines.launch("run", "--workers", "2", "--deadline", "590")
    machines.wait_for("steps-*-50", 2)
    machines.finish()
    output, errors = agent.communicate(forked.AGAINST_HANGS_S)
    result = json.loads(output.splitlines()[-1])
    assert (result["workers_here"], result["workers_lost"]) == ([0, 1], []), errors
    assert min(result["updates_per_worker"]) >= 50
    told = agent.returncode, result["outcome"], result["outcome_reason"]
    crashed = 1, "crashed", "Worker 1: KeyError: 'label 17'."
    assert told == (crashed if machines.algorithm == "all-reduce" else (0, "stopped", ""))


@pytest.mark.parametrize("machines", ["all-reduce"], indirect=True)
def test_the_first_of_two_workers_trains_on_if_it_wakes_while_the_other_one_ends(machines):
    """The other one has no majority, and its loop takes a while to end."""
    slow_end = """
class SlowEnd:
    def __enter__(self):
        pass

    def __exit__(self, kind, *_):
        if kind is not None:
            (folder / "cut-off").touch()
            time.sleep(2)

with"""
    script = SCRIPT.replace("as worker:", "as worker, SlowEnd():").replace("\nwith", slow_end)
    (machines.folder / "script.py").write_text(script)
    agent = machines.launch("run", "--workers", "2", "--deadline", "10")
    machines.wait_for("steps-*-50", 2)
    first = machines.workers()[0]
    os.kill(first, signal.SIGSTOP)
    machines.wait_for("cut-off")
    os.kill(first, signal.SIGCONT)
    machines.wait_for(f"steps-{first}-{machines.steps(first) + 100}")
    machines.finish()
    output, errors = agent.communicate(forked.AGAINST_HANGS_S)
    assert agent.returncode == 0, errors
    assert json.loads(output.splitlines()[-1])["models_in_mean"] == 1


def test_a_run_whose_batches_somebody_else_claimed_has_crashed(machines):
    """A holder of the key: it claimed 30 epochs, and the workers passed them over as if others had had them.

    They stand still while it claims, as they would be at its epochs by then on a machine that is busy with something else.
    """
    address = free_address()
    agent = machines.launch("run", "--join", address, "--workers", "2", "--deadline", "590")
    machines.wait_for("steps-*-50", 2)
    with contextlib.closing(JoinPoint(address, None, 590)) as stranger:
        for pid in machines.workers().values():
            os.kill(pid, signal.SIGSTOP)
        made = {pid: machines.steps(pid) for pid in machines.workers().values()}
        first = sum(made.values()) // 64 + 5  # the files are up to 50 steps behind, and workers claim ahead
        for epoch in range(first, first + 30):
            stranger.add(f"next batch/{epoch}", 64)
        for pid in made:
            os.kill(pid, signal.SIGCONT)
    for pid, steps in made.items():
        machines.wait_for(f"steps-{pid}-{steps + 750}")
    machines.finish()
    output, errors = agent.communicate(forked.AGAINST_HANGS_S)
    result = json.loads(output.splitlines()[-1])
    assert (agent.returncode, result["outcome"]) == (1, "crashed")
    assert re.match(r"1,9\d\d batches were given to no worker of this run: another program", result["outcome_reason"])
    assert result["models_in_mean"] == 2, "what the workers did is there all the same"
    assert "batches were given to no worker" in errors


def _read(path):
    return json.loads(path.read_text())


def _listens(address):
    import socket

    host, port = address.split(":")
    with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 1):
        return True
    return False


BY_HAND = """
import torch
from torch import nn
import paceline as pl

model = nn.Linear(4, 1)
with pl.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), "ad-psgd"):
    for _ in range(20):
        model.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-0.1)
"""


def test_workers_that_subtract_their_gradients_by_hand_are_told(tmp_path):
    """What they average with each other counts as a version, and is no update."""
    (tmp_path / "by_hand.py").write_text(BY_HAND)
    words = ["-m", "paceline", "launch", "--workers", "2", "--out", "run", "--json", "--", "by_hand.py"]
    done = forked.run(words, tmp_path, errors=None)
    assert done.returncode == 2
    assert "never called optimizer.step()" in done.stderr
    assert not (tmp_path / "run").exists()
