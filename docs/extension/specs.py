"""What specs may say: every registry's names, with their defaults, as lists."""

import inspect

from paceline.algorithms import backoff_registry, registry, step_size_registry
from paceline.algorithms.server import registries
from paceline.algorithms.topology import topology_registry
from paceline.model_parallel.layouts import layout_registry
from paceline.optim.outer import outer_registry


def files() -> dict[str, str]:
    """One list for each kind of thing that specs name."""
    kinds = {
        "Algorithms": registry,
        "Back-off": backoff_registry,
        "Step size by staleness": step_size_registry,
        "Topologies": topology_registry,
        "Outer optimizers": outer_registry,
        "Layouts (`--layout`)": layout_registry,
        **{_kind(one): one for one in registries.nested.values()},
    }
    lines = []
    for title, one in kinds.items():
        lines += [f"### {title}", ""]
        for name, cls in one.items():
            summary = (inspect.getdoc(cls) or "").partition("\n")[0]
            lines += [f"`{one.template(name)}`", f": {summary}", ""]
        lines.append("")
    return {"generated/specs.md": "\n".join(lines)}


def _kind(one: object) -> str:
    kind = one.kind  # type: ignore[attr-defined]
    return {"apply rule": "Apply rules (`apply`)"}.get(kind, kind[0].upper() + kind[1:])
