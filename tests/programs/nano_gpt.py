"""A training script in the style of nanoGPT: tied weights, accumulation by hand, a rate without a scheduler.

With bfloat16 on the CPU; on a GPU with float16 and a scaler.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import ttp

vocab_size, n_embd, n_head, n_layer, block_size, batch_size, dropout = 32, 16, 2, 2, 12, 4, 0.1
gradient_accumulation_steps, grad_clip, weight_decay = 2, 1.0, 0.1
learning_rate, min_lr, warmup_iters, lr_decay_iters = 6e-3, 6e-4, 2, 8
device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = "float16" if device == "cuda" else "bfloat16"
ptdtype = getattr(torch, dtype)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.mlp = nn.Sequential(
            nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        q, k, v = (y.view(b, t, n_head, c // n_head).transpose(1, 2) for y in self.c_attn(self.ln_1(x)).split(c, dim=2))
        y = functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout if self.training else 0, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))
        mlp: Tensor = self.mlp(self.ln_2(x))
        return x + mlp


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, n_embd), nn.Embedding(block_size, n_embd)
        self.drop, self.h, self.ln_f = (
            nn.Dropout(dropout),
            nn.Sequential(*(Block() for _ in range(n_layer))),
            nn.Identity(),
        )
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
        self.wte.weight = self.lm_head.weight  # weight tying

    def forward(self, idx: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.drop(self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device)))
        logits = self.lm_head(self.h(x))
        return logits, functional.cross_entropy(logits.view(-1, vocab_size), targets.view(-1))

    def configure_optimizers(self) -> torch.optim.AdamW:
        params = [p for p in self.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in params if p.dim() >= 2], "weight_decay": weight_decay},
            {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95))


def get_batch(data: Tensor) -> tuple[Tensor, Tensor]:
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([data[i : i + block_size] for i in ix.tolist()])
    y = torch.stack([data[i + 1 : i + 1 + block_size] for i in ix.tolist()])
    return x.to(device), y.to(device)


def get_lr(it: int) -> float:
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    ratio = min(1.0, (it - warmup_iters) / (lr_decay_iters - warmup_iters))
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


class Ahead:  # ttp: a batch that was drawn for the next step belongs to the state of the run
    def __init__(self) -> None:
        self.batch: Any = ()

    def state_dict(self) -> dict[str, Any]:
        return {"batch": self.batch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batch = state["batch"]


if device == "cuda":
    torch.use_deterministic_algorithms(True)


@ttp.ttp_to_persist  # ttp
def train(max_iters: int, save_dir: Path, report: Callable[[int, Any], None]) -> dict[str, Any]:
    torch.manual_seed(1337)
    data = torch.randint(0, vocab_size, (2000,))
    raw_model = GPT().to(device)
    scaler = torch.amp.GradScaler(device, enabled=dtype == "float16")
    optimizer = raw_model.configure_optimizers()
    model = DistributedDataParallel(raw_model)
    torch.manual_seed(1337 + 1 + dist.get_rank())
    ahead = Ahead()
    ttp.wrap_optimizer(optimizer, model=model, scaler=scaler, save_dir=save_dir, extra_state=ahead)  # ttp
    iter_num = ttp.restore()  # ttp

    ahead.batch = ahead.batch or get_batch(data)  # fetch the very first batch
    while iter_num < max_iters:
        lr = get_lr(iter_num)
        for param_group in optimizer.param_groups:
            param_group["lr"] = lr
        for micro_step in range(gradient_accumulation_steps):
            model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
            with torch.amp.autocast(device, dtype=ptdtype):
                _, loss = model(*ahead.batch)
                loss = loss / gradient_accumulation_steps
            ahead.batch = get_batch(data)  # prefetch the next batch
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        report(iter_num, loss.item() * gradient_accumulation_steps)
        iter_num += 1
    return {"model": model, "optimizer": optimizer}


main = train
