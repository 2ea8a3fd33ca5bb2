"""The wrapper of an optimizer: it reports when an update begins (gradients are final) and ends (last write is done).

Theory of operation
-------------------
The wrapper adds nothing to the arithmetic: the gradients go into the wrapped optimizer unchanged, and its result is
returned unchanged.

**Graph mode** compiles ``construct``; a Python call in it would run once, at compile time. So the two reports are
operators (``ops.Custom`` with a Python function) that the graph runs in every step. Data flow fixes their order, which
no pass of the compiler may break: the first report takes a value that depends on *all* gradients, the optimizer takes
gradients that depend on the first report's result, the second report takes a value that depends on the optimizer's
result, and the step's result depends on the second report's result. ``side_effect_mem`` prevents the compiler from
removing the reports, or merging them because they look equal.

**PyNative mode** calls the wrapper as a Python object and launches kernels asynchronously. There ``__call__`` makes the
reports; reading ``global_step`` to the host waits for the kernels that were launched before. A function with ``ms.jit``
is compiled in either mode, from ``construct``. Its graph may run on another thread than the caller's.

In a layout of several slices an update may only begin when every rank can make it (docs/concepts.md). MindSpore's own
``OptTFTWrapper`` has an AllReduce for this; here the first report waits for all ranks (``barrier.py``).
"""

from __future__ import annotations

from typing import Any, Protocol

import mindspore as ms
import numpy as np
from mindspore import Tensor, context, nn, ops

from ttp.adapters.mindspore.constraints import check_optimizer_parallel
from ttp.adapters.mindspore.switch import may_be_protected
from ttp.errors import UsageError
from ttp.processor.uncaught import tell_launcher_of_mistakes

_STATE = (
    "param_rank optim_filter loss_scale dynamic_weight_decay grad_centralization dynamic_lr global_step is_group "
    "is_group_lr is_group_params_ordered use_parallel group_params group_lr group_weight_decay "
    "group_grad_centralization grad_centralization_flags skip_auto_parallel_compile learning_rate parameters "
    "_parameters decay_flags dynamic_decay_flags weight_decay exec_weight_decay cache_enable reciprocal_scale "
    "need_scale global_step_increase_tensor param_length enable_tuple_broaden _unique _target "
)
"""Attributes that MindSpore reads from an optimizer. The wrapper has the same objects as the wrapped optimizer."""


class Reporter(Protocol):
    """Receives the reports of a wrapped optimizer. Its methods run on the training thread; they may wait, not raise."""

    def begin_update(self) -> None:
        """Note that an update begins: all gradients are final, and nothing has been written."""

    def end_update(self) -> None:
        """Note that the last write of the update is done."""


class OptTTPWrapper(nn.Optimizer):
    """An ``nn.Optimizer`` whose updates are reported to ttp. ``OptTFTWrapper`` is another name of the class.

    Losses and weights are the same as without the wrapper, bit for bit. If ttp is not switched on when the wrapper is
    made (``MS_ENABLE_TFT='{TTP:1}'`` or ``TTP_PORT``), nothing is reported, and nothing is added to the graph.

    Args:
        opt: a MindSpore optimizer.
        undo: see ``ttp.wrap_optimizer``.

    Raises:
        UsageError: ``opt`` is not an ``nn.Optimizer``, or is wrapped already.
        ConfigError: ttp is on, and the state has no replicas (optimizer parallelism; see
            ``check_optimizer_parallel``).
    """

    def __init__(self, opt: nn.Optimizer, undo: str | None = None) -> None:
        tell_launcher_of_mistakes()
        if not isinstance(opt, nn.Optimizer):
            raise UsageError(
                f"OptTTPWrapper() wraps a mindspore.nn.Optimizer, and got a {type(opt).__module__}."
                f"{type(opt).__qualname__}: use an optimizer of mindspore.nn, or derive yours from nn.Optimizer"
            )
        if isinstance(opt, OptTTPWrapper):
            raise UsageError("this optimizer is wrapped already: wrap it once")
        reports = may_be_protected()
        if reports:
            check_optimizer_parallel()
        # Optimizer.__init__ would make a second global_step and a second learning rate.
        nn.Cell.__init__(self, auto_prefix=False)
        self.opt, self.undo = opt, undo
        for name in _STATE.split():
            if hasattr(opt, name):
                setattr(self, name, getattr(opt, name))
        self.reporter: Reporter | None = None
        self.ttp_reports = reports
        self.ttp_reached = 0
        """The version at which an earlier training in this process ended; the next training continues counting there.
        """
        self.ttp_one = Tensor([1], ms.float32)
        self.ttp_depend = ops.Depend()
        if self.ttp_reports:
            self.ttp_begin, self.ttp_end = _operator(self._begins), _operator(self._ends)

    def construct(self, gradients: Any) -> Any:
        """Report that the update begins, run the wrapped optimizer, and report that the update has ended."""
        if not self.ttp_reports:
            return self.opt(gradients)
        begun = self.ttp_begin(self.ttp_depend(self.ttp_one, gradients))
        result = self.opt(self.ttp_depend(gradients, begun))
        return self.ttp_depend(result, self.ttp_end(self.ttp_depend(self.ttp_one, result)))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``construct``; in PyNative mode the optimizer between two reports. Compiled code does not call this."""
        if not self.ttp_reports or context.get_context("mode") != context.PYNATIVE_MODE:
            return super().__call__(*args, **kwargs)
        self.global_step.asnumpy()
        self._begins(_ONE)
        result = self.opt(*args, **kwargs)
        self.global_step.asnumpy()
        self._ends(_ONE)
        return result

    def _begins(self, one: Any) -> Any:
        if self.reporter is not None:
            self.reporter.begin_update()
        return _ONE

    def _ends(self, one: Any) -> Any:
        if self.reporter is not None:
            self.reporter.end_update()
        return _ONE


OptTFTWrapper = OptTTPWrapper

_ONE = np.array([1], np.float32)


def _operator(function: Any) -> Any:
    """Return ``function`` as an operator of the graph that runs on the host."""
    custom = ops.Custom(function, out_shape=(1,), out_dtype=ms.float32, func_type="pyfunc")
    custom.add_prim_attr("side_effect_mem", True)
    if context.get_context("device_target") != "CPU":
        custom.set_device("CPU")  # not tested: no such device was available
    return custom
