"""A model in parts: a graph placed on unequal devices, matrices cut over a mesh of workers, layers for balance equations."""

from __future__ import annotations

from paceline.model_parallel.tensor.functions import cross_entropy, whole_features
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
