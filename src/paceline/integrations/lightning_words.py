"""Errors of a training loop, reworded for a LightningModule, whose author writes neither `attach` nor `worker.batches`."""

from __future__ import annotations

from paceline.errors import PacelineError

# Phrases of our errors, and their replacement for a module; longer ones come first.
_WORDS = {
    "give attach all of the loop's optimizers as a list, or leave the `with` before another one takes over": (
        "return all optimizers from configure_optimizers"
    ),
    "give attach all of the loop's optimizers as a list": "return all optimizers from configure_optimizers",
    "Give attach all models and optimizers, as in attach((a, b), [optimizer_a, optimizer_b])": (
        "Hold all models in the module, and return all optimizers from configure_optimizers"
    ),
    "give attach all that is trained before the first step, as in attach((model, loss), optimizer), and loose parameters in"
    " an nn.ParameterList": "hold it in the module, and loose parameters in an nn.ParameterList",
    "attach after unfreezing or adding it, in a separate `with` and a separate launch": (
        "unfreeze or add it before fit, and start this fit with a separate launch"
    ),
    ", or write worker.batches(loader, own=True)": "",
    "if each worker has its own data, for example by its rank, write worker.batches(loader, own=True)": (
        "the strategy does not take data that workers have divided"
    ),
    "and worker.batches divide": "and the strategy divide",
    "worker.batches already divides": "the strategy already divides",
    "worker.batches was given": "fit was given",
    "give worker.batches a DataLoader": "give fit a DataLoader",
    "The loop iterates worker.batches twice at once, as in zip(worker.batches(a), worker.batches(b)), but workers share only"
    " one epoch at a time: give it the loader that defines the epoch and iterate the other loader itself, or combine both"
    " data sets, for example with StackDataset": (
        "fit was given several loaders of training batches, but workers share only one epoch at a time: combine the data"
        " sets, for example with StackDataset"
    ),
    "step it by worker.mean(loss), or use worker.follow(scheduler)": (
        "log the metric that it monitors with sync_dist=True, and return schedulers from configure_optimizers"
    ),
    "for example with worker.sum": "for example with self.trainer.strategy.reduce",
    "such as by worker.mean": "such as by self.trainer.strategy.reduce",
    "put `with worker.accumulate():` around passes that may fail, or use": "use",
    "clip by worker.clip_grad_norm_(max_norm)": "leave out gradient_clip_val",
    "clamp and project right after optimizer.step(), with batches from worker.batches": (
        "clamp and project right after optimizer.step()"
    ),
    "while a step was under way, as without worker.batches one always is,": "while a step was under way",
    "load weights before attach, or after the last step": "load weights before fit, or after it",
    "and take the state that the loop has loaded when it attaches: call optimizer.load_state_dict before"
    " `with paceline.attach(...)`": (
        "and take the state that fit loads when it begins: give fit the same ckpt_path on every worker"
    ),
    "load a checkpoint of the optimizer on every worker before attach": "give fit the same ckpt_path on every worker",
    "A launched function can attach only once": "A launched function can call fit only once",
    "give attach a function of the model that returns its test accuracy, attach(model, optimizer, evaluate=accuracy)": (
        "the strategy has none, so stop by the Trainer's own means, such as EarlyStopping"
    ),
    "before you make the optimizer and call attach": "in __init__",
    "leave such calls out of the `with`": "leave such calls out of fit",
    " If that optimizer wraps another, give attach the inner one.": "",
    "call step() of the optimizer that attach was given, and leave": (
        "call step() of an optimizer that configure_optimizers returned, and leave"
    ),
    "call attach on every worker": "call fit with the strategy on every worker",
    "This model, or its optimizer, is inside another attach already": "This model, or its optimizer, is in a fit already",
    "attach needs the whole gradient": "the strategy needs the whole gradient",
    "and attach would separate them": "and the strategy would separate them",
    "change the model before attach": "change the model before fit",
    "requires a gradient only since attach": "requires a gradient only since fit has begun",
    "calling paceline.attach": "calling fit",
    "call paceline.attach": "call fit",
    "did not leave its `with`": "did not end its fit",
    "attach names": "PacelineStrategy names",
    "in attach or by paceline launch": "in PacelineStrategy or by paceline launch",
    "that attach was not given": "that configure_optimizers did not return",
    "that attach was given": "that configure_optimizers returned",
    "but attach was given": "but configure_optimizers returned",
    "attach was given": "configure_optimizers returned",
}


def in_lightnings_words(error: BaseException) -> None:
    """Rewords the error."""
    if isinstance(error, PacelineError) and error.args and isinstance(error.args[0], str):
        said = error.args[0]
        for ours, theirs in _WORDS.items():
            said = said.replace(ours, theirs)
        error.args = (said, *error.args[1:])
