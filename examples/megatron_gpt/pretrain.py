"""Train a small GPT of megatron-core on a text, in any layout; the death of a rank costs no step.

    ttp run --nproc-per-node 4 --max-restarts 3 examples/megatron_gpt/pretrain.py --tp 2

Only the four lines marked with <- ttp are special about this script. See README.md in the same folder.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import ttp
from ttp.testing.digests import digest

SONNETS = Path(__file__).parents[1] / "gpt" / "sonnets.txt"
BYTES = 256


class Text:
    """Draws samples from a text. A sample depends only on the seed and its number, so no position has to be saved."""

    def __init__(self, file: Path, context: int, seed: int) -> None:
        self.bytes = torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8).long()
        self.context, self.seed = context, seed
        if len(self.bytes) <= context:
            raise SystemExit(f"{file} has {len(self.bytes)} bytes; more than the {context} of the context are needed")

    def sample(self, number: int) -> Tensor:
        """Return the ``context`` bytes of a sample, and the byte after them."""
        chance = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
        start = int(torch.randint(len(self.bytes) - self.context, (), generator=chance))
        return self.bytes[start : start + self.context + 1]

    def microbatches(self, args: argparse.Namespace, dp_rank: int) -> Iterator[Tensor]:
        """Yield the microbatches of a data parallel rank for the next iteration."""
        per_rank = args.micro_batch_size * args.microbatches
        first = args.consumed_train_samples + dp_rank * per_rank
        for begin in range(first, first + per_rank, args.micro_batch_size):
            yield torch.stack([self.sample(begin + n) for n in range(args.micro_batch_size)])


# ------------------------------------------------------------------------------------------------------- megatron-core


def build(args: argparse.Namespace) -> tuple[list[Any], Any, Any]:
    """Return model chunks, optimizer and schedule, like Megatron-LM's ``setup_model_and_optimizer``."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.transformer.module import Float16Module

    config, model = make_model(args)
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=True, num_distributed_optimizer_instances=args.instances
    )
    chunks = [DistributedDataParallel(config, ddp, Float16Module(config, model) if args.bf16 else model)]
    settings = OptimizerConfig(
        optimizer="adam", lr=args.lr, min_lr=args.lr / 10, weight_decay=0.1, adam_beta2=0.95, clip_grad=1.0,
        use_distributed_optimizer=True, bf16=args.bf16, params_dtype=config.params_dtype,
    )  # fmt: skip
    optimizer = get_megatron_optimizer(settings, chunks)
    total = args.steps * args.global_batch_size
    schedule = OptimizerParamScheduler(
        optimizer, init_lr=0.0, max_lr=args.lr, min_lr=args.lr / 10, lr_warmup_steps=total // 12, lr_decay_steps=total,
        lr_decay_style="cosine", start_wd=0.1, end_wd=0.1, wd_incr_steps=total, wd_incr_style="constant",
    )  # fmt: skip
    return chunks, optimizer, schedule


def make_model(args: argparse.Namespace) -> tuple[Any, Any]:
    from megatron.core import parallel_state
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    dtype = torch.bfloat16 if args.bf16 else torch.float32
    config = TransformerConfig(
        num_layers=args.layers, hidden_size=args.width, num_attention_heads=args.heads, bf16=args.bf16,
        hidden_dropout=0.1, attention_dropout=0.1, tensor_model_parallel_size=args.tp,
        pipeline_model_parallel_size=args.pp, params_dtype=dtype, pipeline_dtype=dtype,
        use_cpu_initialization=not torch.cuda.is_available(), bias_dropout_fusion=False, masked_softmax_fusion=False,
        gradient_accumulation_fusion=False, persist_layer_norm=False, bias_activation_fusion=False,
    )  # fmt: skip
    config.finalize_model_grads_func = finalize_model_grads
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=BYTES,
        max_sequence_length=args.context,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )
    return config, model if not torch.cuda.is_available() else model.cuda()


def forward_step(samples: Iterator[Tensor], model: Any) -> Any:
    tokens = next(samples)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokens = tokens.to(device)
    context = tokens.shape[1] - 1
    positions = torch.arange(context, device=device).unsqueeze(0)
    mask = torch.ones(1, 1, context, context, dtype=torch.bool, device=device).triu(1)
    return model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:]), mean


def mean(losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss = losses.float().mean()
    return loss, {"loss": loss.detach().clone()}


# ------------------------------------------------------------------------------------------------------------ training


@ttp.ttp_to_persist  # <- ttp
def train(args: argparse.Namespace) -> dict[str, str]:
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from ttp.adapters.megatron import protect  # <- ttp

    parallel_state.initialize_model_parallel(
        args.tp, args.pp, num_distributed_optimizer_instances=args.instances, create_gloo_process_groups=True
    )
    tensor_parallel.model_parallel_cuda_manual_seed(args.seed)
    dp_rank = parallel_state.get_data_parallel_rank()
    args.global_batch_size = args.micro_batch_size * args.microbatches * parallel_state.get_data_parallel_world_size()
    torch.manual_seed(args.seed)
    chunks, optimizer, schedule = build(args)
    torch.manual_seed(args.seed + 10 * dp_rank + 100 * parallel_state.get_pipeline_model_parallel_rank())
    text = Text(args.text, args.context, args.seed)

    protect(chunks, optimizer, schedule, args, save_dir=args.save_dir)  # <- ttp
    step = ttp.restore()  # <- ttp

    speaker = dist.get_rank() == dist.get_world_size() - 1  # the last stage knows the loss
    if speaker and step:
        print(f"resumed after step {step}", flush=True)
    while step < args.steps:
        args.curr_iteration = args.iteration
        chunks[0].zero_grad_buffer()
        optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=text.microbatches(args, dp_rank),
            model=chunks[0],
            num_microbatches=args.microbatches,
            seq_length=args.context,
            micro_batch_size=args.micro_batch_size,
            forward_only=False,
        )
        updated, _, _ = optimizer.step()
        if updated:
            schedule.step(increment=args.global_batch_size)
            step += 1
        args.iteration += 1
        args.consumed_train_samples += args.global_batch_size
        if speaker:
            loss = sum(float(one["loss"]) for one in losses) / len(losses)
            print(f"step {step}/{args.steps}  loss {loss:.4f}", flush=True)
        time.sleep(args.step_ms / 1e3)
    return digests(chunks, optimizer, args)


def digests(chunks: list[Any], optimizer: Any, args: argparse.Namespace) -> dict[str, str]:
    """Return digests of this rank's final state. Those of two runs are equal only if the states are, bit for bit."""
    inner = [each.optimizer for each in optimizer.chained_optimizers]
    moments = [state[key] for one in inner for state in one.state.values() for key in ("exp_avg", "exp_avg_sq")]
    return {
        "weights": digest([parameter.detach().cpu() for chunk in chunks for parameter in chunk.parameters()]),
        "optimizer": digest([moment.cpu() for moment in moments]),
        "samples": str(args.consumed_train_samples),
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = partial(parser.add_argument, type=int, help="default %(default)s")
    for name, value in {"tp": 1, "pp": 1, "instances": 2, "microbatches": 2, "micro-batch-size": 4}.items():
        add(f"--{name}", default=value)
    for name, value in {"layers": 2, "heads": 4, "width": 64, "context": 32, "steps": 60, "seed": 1}.items():
        add(f"--{name}", default=value)
    parser.add_argument("--bf16", action="store_true", help="weights in bf16, with fp32 copies in the optimizer")
    parser.add_argument("--lr", type=float, default=3e-3, help="default %(default)s")
    parser.add_argument("--text", type=Path, default=SONNETS, help="any file (default: sonnets of Shakespeare)")
    parser.add_argument("--save-dir", type=Path, default=Path("runs/megatron_gpt"), help="default %(default)s")
    parser.add_argument("--step-ms", type=float, default=0, help="sleep after each step, to have time to watch")
    args = parser.parse_args()
    args.iteration = args.curr_iteration = args.consumed_train_samples = 0
    return args


def main() -> None:
    args = parse()
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if cuda else "gloo")
    if not cuda:
        sys.path.append(str(Path(__file__).parents[2]))  # the stand-in for CUDA is test code of this checkout
        from tests.adapters.megatron import shims

        shims.apply()
    result = train(args)
    print(f"rank {dist.get_rank()}  " + "  ".join(f"{name} {value}" for name, value in result.items()), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
