"""Communication graphs (`graph`, `custom`) and mixing weights (`mixing`) for algorithms without a central server.

How to choose: up to about 16 workers, `ring`. More, in lockstep: `exponential`, or `one-peer-exponential` for powers of two
and slow links. More, asynchronous: `bipartite-exponential`, or `complete` if every pair can connect. Known wiring: `torus` or
`custom`.
"""

from __future__ import annotations

from paceline.algorithms.topology.custom import Custom
from paceline.algorithms.topology.graph import (
    BipartiteExponential,
    BipartiteRing,
    Complete,
    Exponential,
    OnePeerExponential,
    Ring,
    Roles,
    Star,
    Topology,
    Torus,
)
from paceline.algorithms.topology.mixing import metropolis_weights
from paceline.specs.registry import Registry

__all__ = [
    "BipartiteExponential",
    "BipartiteRing",
    "Complete",
    "Custom",
    "Exponential",
    "OnePeerExponential",
    "Ring",
    "Roles",
    "Star",
    "Topology",
    "Torus",
    "metropolis_weights",
    "topology_registry",
]

topology_registry = Registry("topology")
topology_registry.register("ring", Ring)
topology_registry.register("bipartite-ring", BipartiteRing)
topology_registry.register("complete", Complete)
topology_registry.register("star", Star)
topology_registry.register("torus", Torus)
topology_registry.register("exponential", Exponential)
topology_registry.register("one-peer-exponential", OnePeerExponential)
topology_registry.register("bipartite-exponential", BipartiteExponential)
topology_registry.register("custom", Custom)
