"""Tell by its name what an entry of a checkpoint is: state of MindSpore's optimizers, or of the training as a whole."""

from __future__ import annotations

from collections.abc import Container

_PREFIXES = frozenset({
    "accu_grads", "accum", "accum_update", "adam_m", "adam_v", "ax", "ax_", "exp_avg", "exp_avg_sq", "exp_inf",
    "lamb_m", "lamb_v", "linear", "max_exp_avg_sq", "mean_grad", "mean_square", "moment", "moment1", "moment2",
    "moments", "momentum_buf", "prev", "stat", "step_size", "vhat",
})  # fmt: skip
"""Prefixes that optimizers of MindSpore put before ``.`` and a parameter's name to name their state of the parameter.
"""

_JOINED = ("mu_", "eta_")
"""Prefixes that ``nn.ASGD`` puts directly before the name."""

OPTIMIZER_SCALARS = frozenset({
    "afactor_step", "batch_num", "beta1_power", "beta2_power", "cov_step", "cur_rank", "cur_step_num",
    "current_iterator_step", "epoch_num", "global_step", "last_overflow_iterator_step", "learning_rate", "loss_scale",
    "momentum", "scale_sense", "state_step", "step_num", "step_t", "weight_decay",
})  # fmt: skip
"""Entries of the training as a whole, which belong to no parameter."""


def owner_of(name: str) -> str | None:
    """Return the name of the parameter to which the entry ``name`` is an optimizer's state; None: it is none."""
    prefix, _, owner = name.partition(".")
    if prefix in _PREFIXES:
        return owner
    return next((name.removeprefix(joined) for joined in _JOINED if name.startswith(joined)), None)


def is_optimizer_state(name: str, names: Container[str | None]) -> bool:
    """Return whether inference can do without the entry ``name``: optimizer state of a parameter, or a step counter.

    Args:
        name: the entry.
        names: the names of all parameters.
    """
    return name in OPTIMIZER_SCALARS or owner_of(name) in names
