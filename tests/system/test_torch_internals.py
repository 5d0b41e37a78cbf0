"""The private parts of PyTorch that Paceline uses: a release that lacks one fails here, and the message says what breaks."""

import ast
import re
from operator import attrgetter
from pathlib import Path

import pytest
import torch
import torch.distributed.distributed_c10d
from torch import nn
from torch.nn.utils import parametrize
from torch.optim.lr_scheduler import ConstantLR
from torch.utils import _device, _python_dispatch, _pytree

import paceline

SOURCE = Path(paceline.__file__).parent
FILE = SOURCE / "system" / "torch_internals.py"
SIMULATED = "in simulations, a worker's `with` of autocast, no_grad and the like applies to the others"
ROOTS = {
    "torch": torch,
    "_device": _device,
    "_python_dispatch": _python_dispatch,
    "_pytree": _pytree,
    "parametrize": parametrize,
    "distributed_c10d": torch.distributed.distributed_c10d,
    "module": nn.Linear(1, 1),
    "tensor": torch.ones(2),
    "storage": torch.ones(2).untyped_storage(),
}
PARTS = {
    "torch._C._current_graph_task_id": "a step or a wait inside backward is not refused",
    "torch.autograd.Variable._execution_engine.queue_callback": "gradients are not averaged before backward() returns",
    "torch.autograd._engine_run_backward": "simulated workers that average in backward hang",
    "torch._foreach_copy_": "parameters are copied one by one",
    "torch._C.DisableTorchFunctionSubclass": "embeddings whose tables lie at servers call themselves without end",
    "torch._assert": "placing a model keeps the checks of its default arguments in the graph",
    "torch._C._storage_Use_Count": "attach does not warn of a state_dict() made before it",
    "storage._cdata": "attach does not refuse tensors that share a parameter's memory",
    "module._forward_pre_hooks": "copies and saved files of a model need Paceline",
    "module._forward_pre_hooks_with_kwargs": "copies and saved files of a model need Paceline",
    "module._load_state_dict_pre_hooks": "copies and saved files of a model need Paceline",
    "module._backward_hooks": "a placed model does not call them",
    "module._backward_pre_hooks": "a placed model does not call them",
    "module._forward_hooks": "a placed model does not call them",
    "_pytree.tree_leaves": "a placed model loses the gradient of a custom autograd function",
    "module._parameters": "weights loaded with assign=True are lost",
    "module._buffers": "buffers that the loop replaces are lost",
    "tensor._backward_hooks": "a look at a table's hooks fetches all of the table",
    "tensor._post_accumulate_grad_hooks": "a look at a table's hooks fetches all of the table",
    "tensor._version": "changes that the loop makes by itself go unseen",
    "tensor._base": "layers after a cut one cannot work in place",
    "distributed_c10d._get_default_store": "workers cannot meet in the user's process group",
    "distributed_c10d._abort_process_group": "a failed run on GPUs hangs as it ends",
    "_pytree.tree_map": "batches do not move to the device of a wrapped loader",
    **dict.fromkeys(
        (
            "torch._C._set_grad_enabled",
            "torch._C._autograd._top_saved_tensors_default_hooks",
            "torch._C._autograd._pop_saved_tensors_default_hooks",
            "torch._C._autograd._push_saved_tensors_default_hooks",
            "torch.overrides._get_current_function_mode_stack",
            "torch.overrides._pop_mode",
            "torch.overrides._push_mode",
            "_python_dispatch._get_current_dispatch_mode_stack",
            "_python_dispatch._pop_mode",
            "_python_dispatch._push_mode",
            "_python_dispatch._is_in_torch_dispatch_mode",
            "_python_dispatch._is_in_non_infra_torch_dispatch_mode",
            "_device.CURRENT_DEVICE",
            "torch._GLOBAL_DEVICE_CONTEXT",
            "parametrize._cache_enabled",
            "parametrize._cache",
        ),
        SIMULATED,
    ),
}
# Attributes that PyTorch reads or makes when something happens; further tests make it happen.
ON_OCCASION = {"_step_supports_amp_scaling", "_opt_called", "_wrapped_by_lr_sched"}
MODULES = {"_C", "_autograd", "_device", "_pytree", "_python_dispatch"}
NAMES = {part for name in PARTS for part in name.split(".") if part.startswith("_")} - MODULES | ON_OCCASION


@pytest.mark.parametrize("name", PARTS)
def test_pytorch_has(name):
    root, _, rest = name.partition(".")
    try:
        attrgetter(rest)(ROOTS[root])
    except AttributeError:
        pytest.fail(
            f"PyTorch {torch.__version__} has no {name}; without it {PARTS[name]}: see system/torch_internals.py"
        )


def test_every_private_part_is_listed_here():
    text = FILE.read_text()
    own = {node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)}
    assert set(re.findall(r"[.\"](_[a-z]\w+)", text)) - own <= NAMES | MODULES


def test_no_other_file_uses_private_parts_of_pytorch():
    names = NAMES - {"_version", "_base", "_parameters", "_buffers", "_cache"}  # the last is also Numba's
    private = re.compile(rf"torch\.(\w+\.)*_[a-zA-Z]|from torch\S* import _|from torch\S*\._|\b({'|'.join(names)})\b")
    found = [
        f"{file.relative_to(SOURCE)}:{number}"
        for file in SOURCE.rglob("*.py")
        if file != FILE
        for number, line in enumerate(file.read_text().splitlines(), start=1)
        if private.search(line)
    ]
    assert not found, f"use system/torch_internals.py at {', '.join(found)}"


def test_schedulers_wrap_step_and_ask_whether_it_was_called(recwarn):
    from paceline.system.torch_internals import is_followed_by_scheduler, mark_as_stepped

    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    assert not is_followed_by_scheduler(optimizer)
    scheduler = ConstantLR(optimizer)
    assert is_followed_by_scheduler(optimizer), (
        "without `_wrapped_by_lr_sched` no loop is told that its schedule ends early"
    )
    mark_as_stepped(optimizer)
    scheduler.step()
    assert not recwarn.list, "without `_opt_called` schedulers warn in epochs that a resumed run skips"


def test_grad_scaler_calls_a_step_that_scales_even_after_an_overflow():
    from paceline.system.torch_internals import SCALES_IN_STEP

    parameter = nn.Parameter(torch.ones(1))
    optimizer, scaler = torch.optim.SGD([parameter]), torch.amp.GradScaler("cpu")
    scaler.scale((parameter * float("inf")).sum()).backward()
    calls = []
    optimizer.step = lambda *_: calls.append(1)
    setattr(optimizer, SCALES_IN_STEP, True)
    scaler.step(optimizer)
    assert calls, f"without `{SCALES_IN_STEP}` workers in lockstep wait for one whose gradient overflowed"
