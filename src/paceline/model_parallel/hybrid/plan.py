"""Which layers of a model are cut, how, and the resulting traffic: data, before any worker has started."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.model_parallel.hybrid.layout import HybridParallel
from paceline.tasks.base import evaluation_mode

# Element-wise modules, which work on a part of the features as on all.
_ELEMENTWISE = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid, nn.Softplus,
    nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.Identity, nn.Dropout,
)  # fmt: skip
_NORMS = (nn.BatchNorm1d, nn.SyncBatchNorm, nn.LazyBatchNorm1d)
_OTHER_DROPOUTS = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)

Entry = Literal["rows", "features", "part"]
Exit = Literal["part", "rows", "sum"]


@dataclass(frozen=True)
class CutLayer:
    """One linear layer that is cut.

    Args:
        entry: its input: own `rows`, gathered over the group; a `part` of the features of the group's rows, used directly; or
            such a part, gathered over the `features`.
    """

    name: str  # in the model
    ifm: int  # inputs
    ofm: int  # outputs
    dim: int  # of its weight (ofm, ifm) that is cut: 0 by outputs, 1 by inputs
    entry: Entry
    exit: Exit  # its output: a `part` of the features; own `rows` by all-to-all; own rows of the `sum` of all parts


@dataclass(frozen=True)
class CutPlan:
    """The layers of a model that a group's workers divide."""

    parts: int  # workers in a group
    layers: tuple[CutLayer, ...]  # that are cut, in the order of their registration
    #: Names of `nn.Dropout` modules between two cut layers: they see a part of the features of the group's rows.
    dropouts: tuple[str, ...]

    def group_bytes(self, rows: float, element_bytes: int = 4) -> float:
        """Bytes that a worker sends inside its group in one such step, if each has `rows` rows."""
        elements = 0.0
        for layer in self.layers:
            if layer.entry in ("rows", "features"):
                elements += 2 * rows * layer.ifm
            if layer.exit == "rows":
                elements += 2 * rows * layer.ofm / self.parts
            elif layer.exit == "sum":
                elements += 2 * rows * layer.ofm
        return elements * (self.parts - 1) * element_bytes


def plan_cuts(model: nn.Module, layout: HybridParallel, num_workers: int) -> CutPlan:
    """Chooses the layers to cut, and the exchanges between them.

    Raises:
        UsageError: the layout does not fit the workers or the model; the message gives the remedy.
    """
    parts = layout.parts(num_workers)
    modules = dict(model.named_modules())
    for name, module in modules.items():
        if isinstance(module, _OTHER_DROPOUTS) and module.p:
            raise UsageError(
                f"{type(module).__name__} {name} draws from each worker's own generator, so results would depend on "
                "the number of workers: use nn.Dropout, whose masks under a layout depend only on sample and feature."
            )
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise UsageError(
                f"A layout averages dense gradients, and those of {name} are sparse: give it sparse=False, or leave the"
                " layout out."
            )
    chosen = _chosen(modules, layout, parts)
    if parts == 1:
        return CutPlan(1, (), ())
    layers: list[CutLayer] = []
    dropouts: list[str] = []
    for chain, between in _chains(modules, chosen):
        layers += _cut(chain, modules, layout.pairing)
        inner = [one.exit == "part" for one in layers[-len(chain) :]]
        for is_part, names in zip(inner, between, strict=False):
            dropouts += [name for name in names if is_part and isinstance(modules[name], nn.Dropout)]
    for layer in layers:
        if (size := layer.ifm if layer.dim else layer.ofm) % parts:
            what = "inputs" if layer.dim else "outputs"
            raise UsageError(
                f"{layer.name} has {size} {what}, which {parts} workers of a group cannot share equally: use another "
                "number of groups, or leave it out of layers=."
            )
    _check_untied(model, layers)
    order = {name: at for at, name in enumerate(modules)}
    return CutPlan(parts, tuple(sorted(layers, key=lambda one: order[one.name])), tuple(dropouts))


def cuttable_chains(model: nn.Module, layout: HybridParallel) -> list[list[str]]:
    """Names of the layers that some number of groups could cut, consecutive ones together."""
    modules = dict(model.named_modules())
    return [chain for chain, _ in _chains(modules, list(layout.names) or list(_large(modules, layout)))]


def check_called(plan: CutPlan, model: nn.Module, inputs: Tensor) -> None:
    """Runs the whole model once in evaluation mode to check how its layers are called.

    Raises:
        UsageError: a cut layer is not called, or its inputs are not one row per sample; the message says which.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    modules = dict(model.named_modules())
    hooks = [
        modules[layer.name].register_forward_pre_hook(
            lambda _, args, name=layer.name: shapes.setdefault(name, tuple(args[0].shape)) and None
        )
        for layer in plan.layers
    ]
    try:
        with evaluation_mode(model):
            model(inputs.clone())
    finally:
        for hook in hooks:
            hook.remove()
    for layer in plan.layers:
        if layer.name not in shapes:
            raise UsageError(
                f"The model uses the weight of {layer.name} without calling the module, for example in F.linear, so a "
                "layout cannot cut it: name other layers with layers=, or call the module."
            )
        if len(shapes[layer.name]) != 2:
            raise UsageError(
                f"{layer.name} takes inputs of {len(shapes[layer.name])} dimensions, but a layout cuts layers with "
                "one row for each sample: name others with layers=."
            )


def _chosen(modules: dict[str, nn.Module], layout: HybridParallel, parts: int) -> list[str]:
    if unknown := [name for name in layout.names if not isinstance(modules.get(name), nn.Linear)]:
        linear = [name for name, module in modules.items() if isinstance(module, nn.Linear)]
        raise UsageError(f"{unknown[0]} is not an nn.Linear of the model, which has {', '.join(linear) or 'none'}.")
    if layout.names:
        chosen = list(layout.names)
        if odd := [name for name in chosen if not _is_plain(modules[name])]:
            raise UsageError(
                f"{odd[0]} has frozen or parametrized weights, which a layout cannot cut: leave it out of layers=."
            )
        return chosen
    chosen = [name for name, module in _large(modules, layout).items() if module.out_features % parts == 0]
    if not chosen and parts > 1:
        raise UsageError(
            f"No linear layer of the model has at least {layout.min_weights:,} weights and outputs that {parts} "
            "workers can share equally, so there is nothing to cut: name layers with layers=, or train without a "
            "layout."
        )
    return chosen


def _large(modules: dict[str, nn.Module], layout: HybridParallel) -> dict[str, nn.Linear]:
    return {
        name: one
        for name, one in modules.items()
        if isinstance(one, nn.Linear) and _is_plain(one) and one.weight.numel() >= layout.min_weights
    }


def _is_plain(module: nn.Module) -> bool:
    """Whether a linear layer is PyTorch's own, with trainable parameters."""
    return type(module) is nn.Linear and all(one.requires_grad and one.is_contiguous() for one in module.parameters())


def _chains(modules: dict[str, nn.Module], chosen: list[str]) -> Iterator[tuple[list[str], list[list[str]]]]:
    """Chosen layers that follow each other in an `nn.Sequential`, with only element-wise modules between them.

    Yields their names, and for each the names of the modules after it.
    """
    left = dict.fromkeys(chosen)
    for prefix, module in modules.items():
        if type(module) is not nn.Sequential:
            continue
        chain: list[str] = []
        between: list[list[str]] = []
        norm = ""
        for child, one in module.named_children():
            name = f"{prefix}.{child}" if prefix else child
            if name in left:
                if norm and chain:
                    raise UsageError(
                        f"{norm} lies between the cut layers {chain[-1]} and {name}: the mean and variance of each "
                        "group's samples would differ from those of all samples, so results would depend on groups; "
                        "name other layers with layers=, or use LayerNorm."
                    )
                chain.append(name)
                between.append([])
                del left[name]
            elif isinstance(one, _ELEMENTWISE) and chain:
                between[-1].append(name)
            elif isinstance(one, _NORMS) and chain:
                norm = name
            elif chain:
                yield chain, between
                chain, between, norm = [], [], ""
        if chain:
            yield chain, between
    for name in left:
        yield [name], [[]]


def _cut(chain: list[str], modules: dict[str, nn.Module], pairing: str) -> list[CutLayer]:
    def layer(name: str, dim: int, entry: Entry, exit_: Exit) -> CutLayer:
        module = modules[name]
        assert isinstance(module, nn.Linear)
        return CutLayer(name, module.in_features, module.out_features, dim, entry, exit_)

    if pairing == "gather":
        exits: list[Exit] = [*("part" for _ in chain[1:]), "rows"]
        return [layer(name, 0, "features" if at else "rows", exits[at]) for at, name in enumerate(chain)]
    found: list[CutLayer] = []
    for first, second in pairwise([*chain, ""]):
        if found and found[-1].exit == "part":
            found.append(layer(first, 1, "part", "sum"))
        else:
            found.append(layer(first, 0, "rows", "part" if second else "rows"))
    return found


def _check_untied(model: nn.Module, layers: list[CutLayer]) -> None:
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    for layer in layers:
        for parameter in model.get_submodule(layer.name).parameters():
            if len(names := owners[id(parameter)]) > 1:
                raise UsageError(
                    f"{names[0]} is tied to {names[1]}, but a layout would cut it for one use and not for the other: "
                    f"leave {layer.name} out of layers=, or untie them."
                )
