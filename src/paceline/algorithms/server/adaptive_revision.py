"""AdaptiveRevision: AdaGrad that revises the rates of gradients that overlapped with a late one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from paceline.algorithms.server.apply import Applier, ApplyRule
from paceline.algorithms.server.update import UpdateInfo
from paceline.specs.bounds import ABOVE_0, COUNT


@dataclass(frozen=True, kw_only=True)
class AdaptiveRevision(ApplyRule):
    """Rates that fall with the gradients and with their products over the delay, corrected afterwards.

    Per element, with G the sum of all gradients applied, G_read that sum when the worker read, and z = z' = 1 at first:

        overlap <- G - G_read
        rate_old <- alpha / sqrt(z');  z <- z + g^2 + 2 g overlap;  z' <- max(z', z);  rate <- alpha / sqrt(z')
        x <- x - rate g + (rate_old - rate) overlap;  G <- G + g

    The last term of x is the revision: it moves the gradients applied meanwhile to the new rate. z' keeps rates from rising if
    gradients contradict each other. Without delay this is AdaGrad with z = 1 + sum of g^2.

    Costs: three vectors of state, three more during an update. Echo: G travels with the parameters and returns with the
    gradient, which doubles the traffic; a codec must leave it exact. Snapshot: the server keeps one vector per version that a
    worker may still answer.
    Use when: gradients are sparse and hundreds of updates late; the best alpha then hardly depends on the delay.
    Not: `async-adagrad`, whose best rate falls with the delay.

    Args:
        alpha: None: the learning rate of the run.
        revision_state: where G_read is kept: at the worker (`echo`) or at the server (`snapshot`).
        reads_kept: snapshots kept per worker that reads more often than it sends; gradients at older reads are refused.

    Reference: McMahan and Streeter, "Delay-Tolerant Algorithms for Asynchronous Distributed Online Learning", NIPS 2014.
        Differs: the server keeps snapshots per worker, so it can free those of a dead worker.
    """

    alpha: Annotated[float, ABOVE_0] | None = None
    revision_state: Literal["echo", "snapshot"] = "echo"
    reads_kept: Annotated[int, COUNT] = 4

    moved_vectors: ClassVar[float | None] = 31

    @property
    def echoes(self) -> bool:
        return self.revision_state == "echo"

    @property
    def takes_lookups(self) -> bool:
        return self.echoes  # a snapshot has one version for all elements

    def start(self, num_elements: int, dtype: torch.dtype) -> Applier:
        if self.echoes:
            return _EchoApplier(num_elements, dtype, self.alpha)
        return _SnapshotApplier(num_elements, dtype, self.alpha, self.reads_kept)


class _EchoApplier(Applier):
    def __init__(self, num_elements: int, dtype: torch.dtype, alpha: float | None) -> None:
        self._alpha = alpha
        self._G = torch.zeros(num_elements, dtype=dtype)
        z, z_max = (torch.ones(num_elements, dtype=dtype) for _ in range(2))
        super().__init__(sum_of_gradients=self._G, z=z, z_max=z_max)

    def read(self, worker_id: int, version: int) -> Tensor | None:
        return self._G

    def _step_with(
        self, state: dict[str, Tensor], x: Tensor, gradient: Tensor, info: UpdateInfo, learning_rate: float
    ) -> None:
        self._revise(x, gradient, self._read_sum(info), learning_rate, **state)

    def _read_sum(self, info: UpdateInfo) -> Tensor:
        """The sum of all gradients when the worker read the parameters, for the elements of this gradient."""
        if info.echo is None:
            raise ValueError(
                "adaptive-revision(revision_state=echo) needs the state that the worker read with the parameters"
            )
        return info.echo

    def _revise(
        self,
        x: Tensor,
        gradient: Tensor,
        G_read: Tensor,
        learning_rate: float,
        sum_of_gradients: Tensor,
        z: Tensor,
        z_max: Tensor,
    ) -> None:
        alpha = self._alpha if self._alpha is not None else learning_rate
        overlap = sum_of_gradients - G_read
        rate_old = z_max.rsqrt()
        z.addcmul_(gradient, gradient).addcmul_(gradient, overlap, value=2.0)
        torch.maximum(z_max, z, out=z_max)
        rate = z_max.rsqrt()
        x.addcmul_(gradient, rate, value=-alpha)
        x.addcmul_(overlap, rate_old.sub_(rate), value=alpha)
        sum_of_gradients.add_(gradient)


class _SnapshotApplier(_EchoApplier):
    """Keeps G per version read; versions that several workers read share one copy. Snapshots are not part of the state.

    After a restart from a snapshot workers must read again: earlier gradients are refused. A second copy of the shard repeats
    its reads, and so accepts the same gradients.
    """

    keeps_reads = True

    def __init__(self, num_elements: int, dtype: torch.dtype, alpha: float | None, reads_kept: int) -> None:
        super().__init__(num_elements, dtype, alpha)
        self._reads_kept = reads_kept
        self._versions_of: dict[int, list[int]] = {}  # by worker, in order of reading
        self._G_at: dict[int, Tensor] = {}  # by version

    def read(self, worker_id: int, version: int) -> Tensor | None:
        versions = self._versions_of.setdefault(worker_id, [])
        if version not in versions:
            versions.append(version)
        if version not in self._G_at:
            self._G_at[version] = self._G.clone()
        self._keep(worker_id, versions[-self._reads_kept :])
        return None

    def accepts(self, info: UpdateInfo) -> bool:
        return info.version_read in self._versions_of.get(info.worker_id, ())

    def _read_sum(self, info: UpdateInfo) -> Tensor:
        if not self.accepts(info):
            raise ValueError(
                f"worker {info.worker_id} has never read version {info.version_read}, or read it too long ago"
            )
        G_read = self._G_at[info.version_read]
        versions = self._versions_of[info.worker_id]  # a worker answers its reads in order, so older ones can go
        self._keep(info.worker_id, [one for one in versions if one >= info.version_read])
        return G_read if info.selection is None else info.selection.take(G_read)

    def forget(self, worker_id: int) -> None:
        self._keep(worker_id, [])

    def load(self, state: dict[str, Tensor]) -> None:
        super().load(state)
        self._versions_of.clear()
        self._G_at.clear()

    def reads(self) -> dict[str, Tensor]:
        """`worker.<id>`: the versions that it read, `version.<version>`: G then."""
        versions_of = {f"worker.{worker}": torch.tensor(versions) for worker, versions in self._versions_of.items()}
        return versions_of | {f"version.{version}": G for version, G in self._G_at.items()}

    def load_reads(self, reads: dict[str, Tensor]) -> None:
        self._versions_of.clear()
        self._G_at.clear()
        for name, tensor in reads.items():
            what, _, number = name.partition(".")
            if what == "worker":
                self._versions_of[int(number)] = tensor.long().tolist()
            else:
                self._G_at[int(number)] = tensor.clone()

    def _keep(self, worker_id: int, versions: list[int]) -> None:
        self._versions_of[worker_id] = versions
        live = {version for kept in self._versions_of.values() for version in kept}
        for version in self._G_at.keys() - live:
            del self._G_at[version]
