"""Lets megatron-core train on a machine without an accelerator, for tests and `examples/megatron_gpt`. ttp does not use
it.

Tried with megatron-core 0.16.1 and torch 2.13. Call ``apply()`` first, then import megatron.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from typing import Any

import torch
from torch import Tensor

_CREATORS = ("zeros", "ones", "empty", "tensor", "full", "rand", "randn", "arange")


def apply(*, torch_adam: bool = False) -> None:
    """Make the host look like the one CUDA device that Megatron asks for.

    Args:
        torch_adam: keep torch's AdamW; see ``ApexLikeAdam``.
    """
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.synchronize = lambda *_args: None
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *_args, **_kwargs: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_args, **_kwargs: torch.set_rng_state(state)
    cuda.manual_seed = torch.manual_seed
    cuda.Stream = _Stream
    cuda.stream = lambda _stream: contextlib.nullcontext()
    cuda.current_stream = cuda.default_stream = lambda *_args: _Stream()
    for name in _CREATORS:
        setattr(torch, name, _on_host(getattr(torch, name)))
    tensor: Any = Tensor
    tensor.cuda = lambda self, *_args, **_kwargs: self
    tensor.type = _type_as_if_on_device(Tensor.type)
    warnings.filterwarnings("ignore", module="megatron")
    _shim_random()
    _shim_experts()
    _shim_norm()
    if not torch_adam:
        _shim_adam()


class _Stream:
    def __init__(self, *_args: Any, **_kwargs: Any) -> None: ...

    def wait_stream(self, _other: object) -> None: ...

    def wait_event(self, _event: object) -> None: ...

    def record_event(self, _event: object = None) -> _Stream:
        return self

    def synchronize(self) -> None: ...


def _on_host(create: Any) -> Any:
    @functools.wraps(create)
    def created(*args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return create(*args, **kwargs)

    return created


def _type_as_if_on_device(original: Any) -> Any:
    def type_(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        found = original(self, *args, **kwargs)
        return found.replace("torch.", "torch.cuda.") if isinstance(found, str) else found

    return type_


def _shim_random() -> None:
    from megatron.core.tensor_parallel import random as streams

    module: Any = streams
    module._get_cuda_rng_state = lambda *_args, **_kwargs: torch.get_rng_state()
    module._set_cuda_rng_state = lambda state, *_args, **_kwargs: torch.set_rng_state(state)


class ApexLikeAdam(torch.optim.Optimizer):
    """Counts steps per param group, as the fused optimizers of Apex and Transformer Engine do.

    Megatron's fallback to torch's AdamW is broken: one ``step`` tensor becomes that of all parameters, and counts once
    for each of them.
    """

    def __init__(self, params: Any, lr: float = 1e-3, betas: Any = (0.9, 0.999), eps: float = 1e-8,
                 weight_decay: float = 0.0, adam_w_mode: bool = True) -> None:  # fmt: skip
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "bias_correction": True}
        super().__init__(params, defaults)
        assert adam_w_mode

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert closure is None
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        for key in ("exp_avg", "exp_avg_sq"):
            if key not in state:
                state[key] = torch.zeros_like(parameter)
        grad = parameter.grad
        assert grad is not None
        state["exp_avg"].lerp_(grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        size = group["lr"] / (1 - beta1 ** group["step"])
        denominator = (state["exp_avg_sq"] / (1 - beta2 ** group["step"])).sqrt_().add_(group["eps"])
        parameter.addcdiv_(state["exp_avg"], denominator, value=-size)


def _shim_adam() -> None:
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    chosen: Any = optimizer
    distributed: Any = distrib_optimizer
    chosen.Adam = distributed.Adam = ApexLikeAdam
    chosen.USING_PYTORCH_OPTIMIZER = False
    distributed.HAVE_APEX_OR_TE = distributed.USING_APEX_OPTIMIZER = True


def _shim_experts() -> None:
    from megatron.core.transformer.moe import moe_utils

    module: Any = moe_utils
    module.te_general_gemm = None  # without Transformer Engine the name is missing, and it is asked for


def _shim_norm() -> None:
    """Let torch's norms train with sequence parallelism, as those of Apex and Transformer Engine do."""
    from megatron.core.transformer import torch_norm

    def make(_cls: Any, config: Any, hidden_size: int, eps: float = 1e-5, **_how: Any) -> Any:
        kind = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
        made = kind(hidden_size, eps=eps)
        parameters: Any = made.parameters()
        for parameter in parameters:
            parameter.sequence_parallel = config.sequence_parallel
        return made

    norm: Any = torch_norm.WrappedTorchNorm
    norm.__new__ = make
