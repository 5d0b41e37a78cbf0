"""Runs an algorithm's programs on simulated ports with planted gradients instead of a model."""

from types import SimpleNamespace

import torch

from paceline.simulator.machine import SimulatedMachine


class PlantedReplica:
    """A `Replica` whose gradient is a function of worker, step and parameters."""

    def __init__(self, core, ports, num_steps, gradient, learning_rate):
        self.g = torch.zeros_like(ports.shared.x)
        self.samples, self.round, self.changed_outside, self.scaled = 1, None, False, False
        self.update_time_s, self.rounds_begun = 0.0, 0
        self.updates = torch.zeros_like(self.g)
        self.read = []
        self._core, self._ports, self._num_steps = core, ports, num_steps
        self._gradient, self._learning_rate, self._step = gradient, learning_rate, 0

    def steps(self):
        for step in range(1, self._num_steps + 1):
            self._step = step
            yield step

    def meet(self, members, rounds=None):
        """Its batches are planted, too: they are not dealt."""

    def copy(self, x):
        return x.clone()

    def gradient(self, at, version, ready=None):
        self.read.append(at.clone())
        self.g.copy_(self._gradient(self._ports.worker_id, self._step, at))
        self._core.compute(1)

    def apply(self, to, scale=1.0, of=None):
        before = to.clone()
        to.sub_(self._learning_rate * self.g)
        self.updates += to - before

    def applied(self, version, gradient_version, failed_publishes=0):
        pass


def drive(
    algorithm, cluster, *, num_steps, x0, gradient=None, learning_rate=0.0, faults=None, seed=1, run=True, restarts=0
):
    """Runs every worker's program from its row of `x0` (workers, P); returns machine, replicas and all vectors' end.

    A killed worker's successor finds the parameters that the dead one left.
    """
    machine = SimulatedMachine(
        cluster, algorithm.needs, x=x0[0], vector_bytes=x0[0].nbytes, batch_size=1, seed=seed,
        is_gossip=True, faults=faults, restarts=restarts,
    )  # fmt: skip
    replicas, all_ports = [], []

    def begin(worker):
        core = machine.core(worker)
        ports = machine.ports(core)
        if not ports.incarnation:
            ports.shared.x.copy_(x0[worker])
        replica = PlantedReplica(core, ports, num_steps, gradient or (lambda *_: torch.zeros(())), learning_rate)
        replicas.append(replica)
        all_ports.append(ports)
        machine.start(worker, lambda: algorithm.work(replica, ports))

    machine.lives.restart = begin
    for worker in range(cluster.workers):
        begin(worker)
    if run:
        machine.scheduler.run()
    x = torch.stack([one.shared.x for one in all_ports[: cluster.workers]])
    return SimpleNamespace(machine=machine, replicas=replicas, ports=all_ports, x=x)
