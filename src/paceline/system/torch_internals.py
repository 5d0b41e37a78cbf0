"""PyTorch's private functions and attributes that Paceline uses, each with its reason; PyTorch 2.8 and later have them.

`tests/system/test_torch_internals.py` names what a release lacks, and what breaks without it. Only `Tensor._version`,
`Tensor._base`, `Module._parameters` and `Module._buffers` are read where they are needed, since much other code does so.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn, overrides
from torch.nn.utils import parametrize
from torch.utils import _device, _python_dispatch
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map  # applies a function to all tensors of a batch; has no public name

_C: Any = torch._C
_autograd: Any = torch.autograd

# The id of the backward pass that calls, -1 outside of one: a step or a wait inside backward is refused.
graph_task: Callable[[], int] = _C._current_graph_task_id

# Within a backward pass, runs a function at its end: means of gradients must be complete when `backward` returns.
call_after_backward: Callable[[Callable[[], None]], None] = _autograd.Variable._execution_engine.queue_callback

# One call for all parameters; copying one by one costs a microsecond for each of them in every step.
foreach_copy: Callable[[list[torch.Tensor], list[torch.Tensor]], None] = torch._foreach_copy_  # pyright: ignore

# A context in which tensors of a subclass are plain tensors, for the subclass itself and for moving its memory.
without_overrides: Any = _C.DisableTorchFunctionSubclass

# GradScaler always calls `step` of an optimizer with this attribute, and leaves unscaling to it. It skips other steps if a
# gradient overflowed, which no hook sees.
SCALES_IN_STEP = "_step_supports_amp_scaling"

# Where tensors keep hooks: reading these does not read a tensor's values.
TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")

# Where modules keep the hooks that Paceline adds and that copies leave out.
PRE_HOOKS = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_load_state_dict_pre_hooks")


def backward_entry() -> Any:
    """The function with which all backward passes begin, even in code that has imported `backward` by name."""
    return _autograd._engine_run_backward


def set_backward_entry(run_backward: Callable[..., Any]) -> None:
    """Replaces it, as simulated workers must not wait inside a pass, but right after it; PyTorch has no hook there."""
    _autograd._engine_run_backward = run_backward


def forward_pre_hooks(module: nn.Module) -> list[Any]:
    """A module's hooks: the older `spectral_norm` makes a tensor again in one, so that the tensor is no alias."""
    return list(module._forward_pre_hooks.values())


def backward_hooks(module: nn.Module) -> bool:
    """Whether a module has backward hooks; a graph of its operations would not call them."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def forward_hooks(module: nn.Module) -> bool:
    """Whether a module has forward hooks; a graph of its operations would not call those of the whole model."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def is_followed_by_scheduler(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a learning rate scheduler has wrapped `step`; an optimizer has no reference to its schedulers."""
    return hasattr(optimizer.step, "_wrapped_by_lr_sched")


def mark_as_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Keeps schedulers from warning that they step before the optimizer.

    That is right in an epoch that a resumed run skips, or in which other workers had all the batches.
    """
    optimizer._opt_called = True  # type: ignore[attr-defined]


def storage_id(tensor: torch.Tensor) -> int:
    """Equal for tensors of one storage, even if several begin at one address."""
    return tensor.untyped_storage()._cdata


def num_storage_users(storage: int) -> int:
    """How many tensors refer to a storage: more than the model has are aliases outside of it."""
    return _C._storage_Use_Count(storage) - _NUM_OTHER_USERS


# Python's object of a storage counts, too, but not in PyTorch 2.8 and 2.9.
_TENSOR = torch.empty(1)
_NUM_OTHER_USERS: int = _C._storage_Use_Count(storage_id(_TENSOR)) - 1


def is_assert(function: Any) -> bool:
    """Whether a node of a graph is a check that torch.fx has added."""
    return function is torch._assert or "assert" in getattr(function, "__name__", "")


def default_store() -> Any:
    """The store of the user's process group, where its members meet; it cannot be made a second time."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def abort_process_group(group: Any) -> None:
    """Ends a group after a failure: `destroy_process_group` waits for GPU operations that hang."""
    from torch.distributed import distributed_c10d

    distributed_c10d._abort_process_group(group)


# PyTorch's contexts, such as autocast: each simulated worker has its own, although all take turns in one process. Most of
# them have no public functions to read and set them.

Contexts = tuple[list[Any], ...]


def autocast_depth() -> int:
    """How many contexts of autocast the caller is in."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def _set_nesting(depth: int) -> None:
    for _ in range(autocast_depth(), depth):
        torch.autocast_increment_nesting()
    for _ in range(depth, autocast_depth()):
        torch.autocast_decrement_nesting()


def _saved_hooks() -> list[Any]:
    hooks: list[Any] = []
    while (top := _C._autograd._top_saved_tensors_default_hooks(False)) is not None:
        hooks.insert(0, top)
        _C._autograd._pop_saved_tensors_default_hooks()
    for pair in hooks:
        _C._autograd._push_saved_tensors_default_hooks(*pair)
    return hooks


# How each is read and set.
_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.is_grad_enabled, _C._set_grad_enabled),
    *(
        pair
        for device in ("cpu", "cuda")
        for pair in (
            (partial(torch.is_autocast_enabled, device), partial(torch.set_autocast_enabled, device)),
            (partial(torch.get_autocast_dtype, device), partial(torch.set_autocast_dtype, device)),
        )
    ),
    (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    (autocast_depth, _set_nesting),
    (
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda both: torch.set_anomaly_enabled(*both),
    ),
    (torch.get_default_dtype, torch.set_default_dtype),
)
# How each stack is read, popped from and pushed to.
_STACKS: tuple[tuple[Callable[[], list[Any]], Callable[[], Any], Callable[[Any], Any]], ...] = (
    (overrides._get_current_function_mode_stack, overrides._pop_mode, overrides._push_mode),
    (_python_dispatch._get_current_dispatch_mode_stack, _python_dispatch._pop_mode, _python_dispatch._push_mode),
    (
        _saved_hooks,
        _C._autograd._pop_saved_tensors_default_hooks,
        lambda pair: _C._autograd._push_saved_tensors_default_hooks(*pair),
    ),
)
# Variables: of `with torch.device`, `set_default_device`, dispatch modes and `parametrize.cached`.
_VARIABLES: tuple[tuple[Any, str], ...] = (
    (_device, "CURRENT_DEVICE"),
    (torch._GLOBAL_DEVICE_CONTEXT, "device_context"),
    (_python_dispatch, "_is_in_torch_dispatch_mode"),
    (_python_dispatch, "_is_in_non_infra_torch_dispatch_mode"),
    (parametrize, "_cache_enabled"),
    (parametrize, "_cache"),
)


def read_contexts() -> Contexts:
    """The contexts of this thread."""
    return (
        [get() for get, _ in _SETTINGS],
        [get() for get, _, _ in _STACKS],
        [getattr(owner, name, None) for owner, name in _VARIABLES],
    )


def write_contexts(contexts: Contexts) -> None:
    """Enters and leaves contexts until they are as they were read."""
    settings, stacks, variables = contexts
    for (get, put), value in zip(_SETTINGS, settings, strict=True):
        if get() != value:
            put(value)
    for (get, pop, push), stack in zip(_STACKS, stacks, strict=True):
        found = get()
        if found != stack:
            for _ in found:
                pop()
            for one in stack:
                push(one)
    for (owner, name), value in zip(_VARIABLES, variables, strict=True):
        setattr(owner, name, value)


def clear_parametrizations() -> None:
    """Forgets what `parametrize.cached` has filled."""
    parametrize._cache = {}  # type: ignore[attr-defined]
