"""Gives DistributedDataParallel after a restart the layout of all-reduce buckets that it had before.

Theory of operation
-------------------
With three or more ranks an all-reduce adds the ranks' values of an element in an order that depends on the element's
place in the buffer. DDP begins with one layout and, in the forward pass after the first synchronised backward pass,
switches to another: parameters in the order in which their gradients became ready. A resumed job would make its first
step in the initial layout, where the unbroken job made the same step in the rebuilt one, and the weights of the two
would differ from then on. So the layout is saved with the version and given to the new reducer before its first step.
The new reducer then rebuilds its buckets by the same rule from the same order, and gets the same layout again.

DDP shows the rebuilt layout in its logging data, but only from the third forward pass on, and under a lock that stays
held while the main thread hangs in an all-reduce. Hence ``BucketWatch``: in the first backward pass it records the
order by hooks and computes the layout as the reducer will; later it reads the logging data, on the training thread
between updates. Its result can be read from any thread.

All of this relies on private parts of torch. If something is not as expected, the DDP is not changed and a reason is
returned.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import FunctionType
from typing import Any

import torch.distributed
from torch import Tensor

Buckets = list[list[int]]
Ddp = Any
"""A ``DistributedDataParallel``. It is ``Any`` because type checkers do not know its private attributes."""

_dist: Any = torch.distributed

_POLLS_MAX = 12
"""Updates after which ``BucketWatch`` stops: DDP has rebuilt its buckets by then, or never will."""

_applied: weakref.WeakKeyDictionary[Ddp, str] = weakref.WeakKeyDictionary()
_WHAT_MAY_FAIL = (AttributeError, TypeError, ValueError, RuntimeError, KeyError, IndexError)


def reduced_by(ddp: Ddp) -> list[Tensor]:
    """Return the parameters of the module that it was not told to ignore, trained and frozen ones."""
    ignored = set(getattr(ddp, "parameters_to_ignore", ()))
    return [parameter for name, parameter in ddp.module.named_parameters() if name not in ignored]


def bucket_layout(ddp: Ddp) -> str | None:
    """Return the bucket layout for the next step, e.g. ``"7 6 5 4, 2 3 1 0"``: parameter numbers, bucket by bucket.

    None means DDP's initial layout, or that the layout is not known yet. Call it on the training thread only, outside
    of a backward pass: on another thread it would hang while an all-reduce hangs.
    """
    try:
        text = ddp._get_ddp_logging_data().get("rebuilt_per_bucket_param_indices")
    except _WHAT_MAY_FAIL:
        text = None
    return str(text) if text else _applied.get(ddp)


def apply_bucket_layout(ddp: Ddp, layout: str) -> str | None:
    """Make ``ddp`` reduce in ``layout`` from its first step on.

    All ranks call it with the same layout, before the first forward pass.

    Returns:
        None on success; else the reason why ``ddp`` was left unchanged.
    """
    try:
        buckets = _parse(layout)
        with _as_made(ddp):
            parameters, sparse = ddp._build_params_for_reducer()
            if (reason := _objection(ddp, buckets, len(parameters))) is not None:
                return reason
            _replace_reducer(ddp, buckets, parameters, sparse)
    except _WHAT_MAY_FAIL as problem:
        return f"the bucket layout of DistributedDataParallel could not be restored ({problem!r})"
    _applied[ddp] = layout
    return None


def missing_layout(ddp: Ddp) -> str | None:
    """Return why a job that resumes without a saved layout may get different bits; None if its layout never changes."""
    if torch.distributed.get_world_size(ddp.process_group) <= 2 or getattr(ddp, "_use_python_reducer", False):
        return None
    if ddp.find_unused_parameters and not ddp.static_graph:
        return None
    return "no bucket layout of DistributedDataParallel was known when the checkpoint was made"


def why_not_renewed(ddp: Ddp) -> str:
    """Return why ``renew_reducer`` cannot reset ``ddp``; an empty string if it can."""
    for has, what in (
        (ddp.mixed_precision is not None, "mixed_precision"),  # first, as it registers a communication hook
        (ddp._comm_hooks or _builtin_hook(ddp), "a communication hook"),
        (ddp.static_graph, "static_graph"),
        (getattr(ddp, "_use_python_reducer", False), "the Python reducer"),
        (getattr(ddp, "_join_config", None) is not None and ddp._join_config.enable, "join()"),
    ):
        if has:
            return f"the reducer of DistributedDataParallel with {what} cannot be reset"
    return ""


def renew_reducer(ddp: Ddp) -> None:
    """Reset ``ddp`` to the state after its construction, with a new reducer that has reduced nothing.

    All ranks have to do it, because in its first backward pass a reducer agrees on new buckets with those of the other
    ranks.
    """
    _applied.pop(ddp, None)
    with _as_made(ddp):
        parameters, sparse = ddp._build_params_for_reducer()
        names = ddp._build_debug_param_to_name_mapping(parameters)
        ddp._ddp_init_helper(parameters, sparse, names, ddp.static_graph)
    ddp._has_rebuilt_buckets = False
    ddp.require_forward_param_sync = ddp.require_backward_grad_sync = True


class BucketWatch:
    """Finds out the bucket layout that the next step will use, from the first update on.

    The cost is a Python call per parameter in the first synchronised backward pass (the second, for a static graph).

    Args:
        ddp: the module, best before its first forward pass; later, its layout is unknown until its logging data has it.
    """

    def __init__(self, ddp: Ddp) -> None:
        self._ddp = ddp
        self._layout: str | None = None
        self._previous: str | None = self.layout
        self._settled = False
        self._order: dict[int, None] = {}
        self._backwards_to_skip = 1 if ddp.static_graph else 0
        self._polls_left = 0 if ddp.find_unused_parameters and not ddp.static_graph else _POLLS_MAX
        self._handles: list[Any] = []
        self._parameters: list[Any] = []
        try:
            if self._polls_left and not ddp._has_rebuilt_buckets:
                self._listen()
        except _WHAT_MAY_FAIL:
            self.close()

    @property
    def layout(self) -> str | None:
        """The layout for the step after the last finished update; None: DDP's initial layout. For any thread."""
        return self._layout or _applied.get(self._ddp)

    @property
    def previous(self) -> str | None:
        """The value of ``layout`` before the last update, for a save that undoes it."""
        return self.layout if self._settled else self._previous

    def update_finished(self) -> bool:
        """Update the layout after a finished update. For the training thread.

        Returns:
            Whether to call this again after the next update; False if the layout does not change any more.
        """
        self._previous = self.layout
        self._settled = not self._polls_left
        if self._polls_left:
            self._polls_left -= 1
            self._look()
        return not self._settled

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _listen(self) -> None:
        self._parameters, self._sparse = self._ddp._build_params_for_reducer()
        for index, parameter in enumerate(self._parameters):
            self._handles.append(parameter.register_post_accumulate_grad_hook(partial(self._ready, index)))

    def _ready(self, index: int, _parameter: Tensor) -> None:
        if self._ddp.require_forward_param_sync:  # false in the backward pass of a forward pass under no_sync()
            self._order.pop(index, None)
            self._order[index] = None

    def _look(self) -> None:
        shown = bucket_layout(self._ddp) if self._ddp._has_rebuilt_buckets else None
        if shown is not None and shown != _applied.get(self._ddp):
            self._layout, self._polls_left = shown, 0
        elif self._handles and len(self._order) == len(self._parameters):
            self._use_order()
        if not self._polls_left:
            self.close()

    def _use_order(self) -> None:
        if self._backwards_to_skip:
            self._backwards_to_skip -= 1
            self._order.clear()
            return
        self.close()
        try:
            self._layout = _format(_rebuilt_buckets(self._ddp, self._parameters, self._sparse, list(self._order)))
        except _WHAT_MAY_FAIL:
            self._layout = None  # it will be read from DDP's logging data


# -------------------------------------------------------------------------------------------------------------- private


def _format(buckets: Buckets) -> str:
    return ", ".join(" ".join(map(str, bucket)) for bucket in buckets)


def _parse(layout: str) -> Buckets:
    return [[int(index) for index in bucket.split()] for bucket in layout.split(",")]


@contextlib.contextmanager
def _as_made(ddp: Ddp) -> Iterator[None]:
    """Let all parameters require gradients in the block, if they did when ``ddp`` was made: a loop may freeze them.

    Parameters that were frozen before ``ddp`` was made are not in its reducer, which would wait for their gradients.
    """
    frozen = [parameter for parameter in ddp.module.parameters() if not parameter.requires_grad]
    if ddp._get_ddp_logging_data()["num_parameter_tensors"] < len(list(ddp.module.parameters())):
        frozen = []
    try:
        for parameter in frozen:
            parameter.requires_grad_(True)
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def _objection(ddp: Ddp, buckets: Buckets, count: int) -> str | None:
    if sorted(index for bucket in buckets for index in bucket) != list(range(count)):
        return f"the checkpoint's bucket layout is not for the {count} parameters of this DistributedDataParallel"
    if ddp.mixed_precision is not None:
        return "DistributedDataParallel with mixed_precision= keeps state in its reducer that cannot be carried over"
    if getattr(ddp, "_use_python_reducer", False):
        return "the Python reducer of compiled DistributedDataParallel has no buckets"
    return None


def _builtin_hook(ddp: Ddp) -> Any:
    """Return the type of the registered built-in (C++) communication hook; None if there is none."""
    name = "" if ddp._comm_hooks else str(ddp._get_ddp_logging_data().get("comm_hook", ""))
    return getattr(_dist.BuiltinCommHookType, name.rpartition(".")[2]) if name else None


def _replace_reducer(ddp: Ddp, buckets: Buckets, parameters: list[Tensor], sparse: Any) -> None:
    """Let DDP construct a new reducer by its own code, but with this bucket layout."""
    answers: list[Buckets] = []

    def answer(*_args: Any, **_kwargs: Any) -> tuple[Buckets, list[int]]:
        answers.append(buckets)
        first, *others = _limits(ddp)
        limits = [first, *(others[min(n, len(others) - 1)] if others else first for n in range(len(buckets) - 1))]
        # DDP reverses both lists, because it expects buckets in the order of definition.
        return buckets[::-1], limits[::-1]

    before, builtin = ddp.reducer, _builtin_hook(ddp)
    names = ddp._build_debug_param_to_name_mapping(parameters)
    construct = _asking(answer, inspect.unwrap(type(ddp)._ddp_init_helper))
    construct(ddp, parameters, sparse, names, ddp.static_graph)
    if ddp.reducer is before or not answers:
        raise RuntimeError("this version of torch chooses its buckets in another way")
    if ddp.static_graph:
        ddp.reducer._set_static_graph()
        ddp.logger._set_static_graph()
    if builtin is not None:
        ddp._register_builtin_comm_hook(builtin)
    for hook, state in ddp._comm_hooks:
        _dist._register_comm_hook(ddp.reducer, state, hook)


def _rebuilt_buckets(ddp: Ddp, parameters: Sequence[Tensor], sparse: Sequence[bool], order: list[int]) -> Buckets:
    """Return the buckets that the reducer will make of this order; computes as ``Reducer::rebuild_buckets`` in C++."""
    small_last = os.environ.get("DDP_SET_LAST_BUCKET_CAP") == "1"
    if small_last:
        order = order[::-1]
    compute: Callable[..., tuple[Buckets, Any]] = _dist._compute_bucket_assignment_by_size
    found, _ = compute([parameters[index] for index in order], _limits(ddp), sparse, order)
    return found[::-1] if small_last else found


def _limits(ddp: Ddp) -> list[int]:
    """Return the size limits of the buckets of a rebuilt layout, in bytes; the last one is for all further buckets."""
    config = getattr(ddp, "_bucket_config", None)
    if config is None:  # before torch 2.9
        first = _dist._DEFAULT_FIRST_BUCKET_BYTES if ddp.bucket_bytes_cap_default else ddp.bucket_bytes_cap
        return [first, ddp.bucket_bytes_cap]
    if config.per_bucket_bytes_caps:
        return list(config.per_bucket_bytes_caps)
    return [config.first_bucket_bytes_cap, config.bucket_bytes_cap]


def _asking(answer: Callable[..., Any], method: FunctionType) -> Callable[..., Any]:
    """Return a copy of the function ``method`` that calls ``answer`` for ``_compute_bucket_assignment_by_size``.

    The module ``torch.distributed`` itself is not patched, because other threads may be making other reducers.
    """
    names = method.__globals__ | {"dist": _Dist(answer)}
    return FunctionType(method.__code__, names, method.__name__, method.__defaults__, method.__closure__)


class _Dist:
    """Stands for ``torch.distributed``, with another ``_compute_bucket_assignment_by_size``."""

    def __init__(self, answer: Callable[..., Any]) -> None:
        self._compute_bucket_assignment_by_size = answer

    def __getattr__(self, name: str) -> Any:
        return getattr(_dist, name)
