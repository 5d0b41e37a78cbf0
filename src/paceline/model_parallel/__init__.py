"""A model in parts: its layers, for the balance equations; a graph over unequal devices; matrices cut over a mesh of workers.

What `tensor` has is named here and imported when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.model_parallel.tensor.layers import (
        MLP,
        Attention,
        Block,
        Dropout,
        Embedding,
        LayerNorm,
        Linear,
        PositionEmbedding,
    )
    from paceline.model_parallel.tensor.losses import cross_entropy, whole_features
    from paceline.model_parallel.tensor.mesh import Mesh
    from paceline.model_parallel.tensor.shapes import Grid, Line, choose_mesh, parse_mesh
    from paceline.model_parallel.tensor.state import (
        check_model,
        clip_grad_norm,
        full_optimizer_state,
        full_state_dict,
        load_full_optimizer_state,
        load_full_state_dict,
        sharded_state_dict,
    )
    from paceline.model_parallel.tensor.traffic import block_traffic

__all__ = [
    "MLP",
    "Attention",
    "Block",
    "Dropout",
    "Embedding",
    "Grid",
    "LayerNorm",
    "Line",
    "Linear",
    "Mesh",
    "PositionEmbedding",
    "block_traffic",
    "check_model",
    "choose_mesh",
    "clip_grad_norm",
    "cross_entropy",
    "full_optimizer_state",
    "full_state_dict",
    "load_full_optimizer_state",
    "load_full_state_dict",
    "parse_mesh",
    "sharded_state_dict",
    "whole_features",
]

_ELSEWHERE = {
    "Mesh": "mesh",
    "block_traffic": "traffic",
    **dict.fromkeys(("cross_entropy", "whole_features"), "losses"),
    **dict.fromkeys(("Grid", "Line", "choose_mesh", "parse_mesh"), "shapes"),
    **dict.fromkeys(
        (
            "check_model", "clip_grad_norm", "full_optimizer_state", "full_state_dict", "load_full_optimizer_state",
            "load_full_state_dict", "sharded_state_dict",
        ),
        "state",
    ),
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'paceline.model_parallel' has no attribute {name!r}")
    module = importlib.import_module(f"paceline.model_parallel.tensor.{_ELSEWHERE.get(name, 'layers')}")
    globals()[name] = value = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
