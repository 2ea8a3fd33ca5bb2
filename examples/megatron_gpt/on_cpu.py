"""Lets megatron-core train on a machine without an accelerator, so that the example can be tried there.

None of this is needed on GPUs, and none of it belongs into a program of your own. Measured with megatron-core 0.16.1.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from typing import Any

import torch
from torch import Tensor

_CREATORS = ("zeros", "ones", "empty", "tensor", "full", "rand", "randn", "arange")


def pretend() -> None:
    """Make the host look like the one CUDA device that Megatron asks for. Before megatron is imported."""
    warnings.filterwarnings("ignore")
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.synchronize = lambda *_args: None
    cuda.get_rng_state = lambda *_args, **_kwargs: torch.get_rng_state()
    cuda.manual_seed = torch.manual_seed
    cuda.Stream, cuda.stream = _Stream, lambda _stream: contextlib.nullcontext()
    cuda.current_stream = cuda.default_stream = lambda *_args: _Stream()
    for name in _CREATORS:
        setattr(torch, name, _on_host(getattr(torch, name)))
    tensor: Any = Tensor
    tensor.cuda = lambda self, *_args, **_kwargs: self
    tensor.type = _named_as_on_device(Tensor.type)

    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer
    from megatron.core.tensor_parallel import random

    streams: Any = random
    streams._get_cuda_rng_state = lambda *_args, **_kwargs: torch.get_rng_state()
    streams._set_cuda_rng_state = lambda state, *_args, **_kwargs: torch.set_rng_state(state)
    chosen: Any = optimizer
    distributed: Any = distrib_optimizer
    chosen.Adam = distributed.Adam = Adam
    chosen.USING_PYTORCH_OPTIMIZER = False
    distributed.HAVE_APEX_OR_TE = distributed.USING_APEX_OPTIMIZER = True


class _Stream:
    def __init__(self, *_args: Any, **_kwargs: Any) -> None: ...

    def wait_stream(self, _other: object) -> None: ...

    def wait_event(self, _event: object) -> None: ...

    def record_event(self, _event: object = None) -> None: ...


def _on_host(create: Any) -> Any:
    @functools.wraps(create)
    def created(*args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return create(*args, **kwargs)

    return created


def _named_as_on_device(original: Any) -> Any:
    def type_(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        found = original(self, *args, **kwargs)
        return found.replace("torch.", "torch.cuda.") if isinstance(found, str) else found

    return type_


class Adam(torch.optim.Optimizer):
    """AdamW that counts steps per param group, as Apex and Transformer Engine do; torch's own is miscounted here."""

    def __init__(
        self, params: Any, lr: float, betas: Any, eps: float, weight_decay: float, adam_w_mode: bool = True
    ) -> None:
        assert adam_w_mode
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        if not state:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        state["exp_avg"].lerp_(grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        size = group["lr"] / (1 - beta1 ** group["step"])
        denominator = (state["exp_avg_sq"] / (1 - beta2 ** group["step"])).sqrt_().add_(group["eps"])
        parameter.addcdiv_(state["exp_avg"], denominator, value=-size)
