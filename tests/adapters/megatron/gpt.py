"""A small GPT of megatron-core that trains on the host in any layout, deterministically."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

SEQUENCE, VOCABULARY, MICROBATCHES = 8, 64, 2


@dataclass(frozen=True)
class Shape:
    """The layout of a job, and its numerical settings."""

    tp: int = 1
    pp: int = 1
    virtual: int = 1
    ep: int = 1
    etp: int | None = None  # tensor parallel slices of an expert; None: as many as of the rest
    cp: int = 1
    instances: int = 1
    experts: bool = False
    distributed: bool = True
    bf16: bool = False
    fp16_scaler: bool = False
    tied: bool = True
    overlap: bool = False
    dropout: float = 0.1
    layers: int = 2
    torch_adam: bool = False
    overflows: tuple[int, ...] = ()
    frozen: bool = False
    frozen_below: bool = False
    replicated: bool = False
    scaled: bool = False
    mtp: bool = False  # an additional layer that predicts the token after the next
    model: dict[str, Any] = field(default_factory=dict)  # further settings of its TransformerConfig


class Training:
    """Model, optimizer and scheduler of one rank; ``step`` makes one iteration.

    Args:
        shape: the job's layout.
        seed: of weights and random streams.
    """

    def __init__(self, shape: Shape, seed: int = 123) -> None:
        from megatron.core import parallel_state, tensor_parallel

        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel(
                shape.tp,
                shape.pp,
                virtual_pipeline_model_parallel_size=shape.virtual if shape.virtual > 1 else None,
                expert_model_parallel_size=shape.ep,
                expert_tensor_parallel_size=shape.etp,
                context_parallel_size=shape.cp,
                num_distributed_optimizer_instances=shape.instances,
                create_gloo_process_groups=True,
            )
        tensor_parallel.random.initialize_rng_tracker(force_reset=True)
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
        torch.manual_seed(seed)
        self.shape = shape
        self.dp_rank = parallel_state.get_data_parallel_rank()
        self.batch = MICROBATCHES * parallel_state.get_data_parallel_world_size()
        self.args = Namespace(iteration=0, curr_iteration=0, consumed_train_samples=0, global_batch_size=self.batch)
        self.config = _config(shape)
        self.args.qk_clip = self.config.qk_clip
        self.chunks = [_chunk(self.config, shape, stage) for stage in range(shape.virtual)]
        self.optimizer = _optimizer(self.chunks, shape)
        self.scheduler = _scheduler(self.optimizer, self.batch)
        # As Megatron-LM: tensor parallel ranks share this stream, or their copies of one parameter would drift apart.
        own = 0 if shape.replicated else 10 * self.dp_rank  # as --data-parallel-random-init, or not
        torch.manual_seed(seed + own + 100 * parallel_state.get_pipeline_model_parallel_rank())
        self.losses: list[float] = []
        self.before_update: Callable[[], None] = lambda: None
        """Called between the reduced gradients and the optimizer; tests put something here."""

    def train(self, updates: int) -> None:
        """Iterate until ``updates`` more updates are made."""
        while updates:
            updates -= self.step()

    def step(self) -> bool:
        """Make one iteration as Megatron-LM does. Returns whether it was an update."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self.args.curr_iteration = self.args.iteration
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        samples = [self._samples() for _ in self.chunks]
        seen = get_forward_backward_func()(
            forward_step_func=self._forward,
            data_iterator=samples if len(samples) > 1 else samples[0],
            model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
            num_microbatches=MICROBATCHES,
            seq_length=SEQUENCE,
            micro_batch_size=1,
            forward_only=False,
        )
        self.losses += [float(one["loss"]) for one in seen]
        if self.args.iteration in self.shape.overflows:
            next(self.chunks[0].parameters()).main_grad.fill_(torch.inf)
        self.before_update()
        done, _, _ = self.optimizer.step()
        if self.config.qk_clip:
            self._clip()
        if done:
            self.scheduler.step(increment=self.batch)
        self.args.iteration += 1
        self.args.consumed_train_samples += self.batch
        return bool(done)

    def _clip(self) -> None:
        """Clip as Megatron-LM's ``train_step`` does. Only Transformer Engine measures logits; here all are large."""
        from megatron.core.optimizer.qk_clip import clip_qk

        for chunk in self.chunks:
            for layer in chunk.module.module.decoder.layers:
                attention = layer.self_attention
                heads = attention.num_attention_heads_per_partition
                attention.core_attention.current_max_attn_logits = torch.full((heads,), 101.0)
        clip_qk(self.chunks)

    def _samples(self) -> Iterator[Tensor]:
        for number in range(MICROBATCHES):
            sample = self.args.consumed_train_samples + self.dp_rank * MICROBATCHES + number
            yield torch.randint(0, VOCABULARY, (1, SEQUENCE + 1), generator=torch.Generator().manual_seed(sample))

    def _forward(self, samples: Iterator[Tensor], model: Any) -> Any:
        tokens = next(samples)
        positions = torch.arange(SEQUENCE).unsqueeze(0)
        mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
        output = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:])
        return output, partial(_loss)


def _loss(output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss = output.float().mean()
    return loss, {"loss": loss.detach().clone()}


def _config(shape: Shape) -> Any:
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.transformer import TransformerConfig

    dtype = torch.bfloat16 if shape.bf16 else torch.float32
    config = TransformerConfig(
        num_layers=shape.layers,
        hidden_size=16,
        num_attention_heads=4,
        use_cpu_initialization=True,
        hidden_dropout=shape.dropout,
        attention_dropout=shape.dropout,
        tensor_model_parallel_size=shape.tp,
        pipeline_model_parallel_size=shape.pp,
        virtual_pipeline_model_parallel_size=shape.virtual if shape.virtual > 1 else None,
        expert_model_parallel_size=shape.ep,
        expert_tensor_parallel_size=shape.etp or shape.tp,
        num_moe_experts=4 if shape.experts else None,
        mtp_num_layers=1 if shape.mtp else None,
        moe_token_dispatcher_type="allgather",
        add_bias_linear=not shape.experts,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        bf16=shape.bf16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        bias_activation_fusion=False,
        **shape.model,
    )
    config.finalize_model_grads_func = finalize_model_grads
    return config


def _chunk(config: Any, shape: Shape, stage: int) -> Any:
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
    from megatron.core.transformer.module import Float16Module

    virtual = {"vp_stage": stage} if shape.virtual > 1 else {}
    spec = get_gpt_layer_local_spec(num_experts=4 if shape.experts else None, moe_grouped_gemm=False)
    model: Any = GPTModel(
        config,
        spec,
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, **virtual),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, **virtual),
        share_embeddings_and_output_weights=shape.tied,
        position_embedding_type="none" if shape.mtp else "learned_absolute",  # Megatron lets its copies drift apart
        mtp_block_spec=get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False) if shape.mtp else None,
        **virtual,
    )
    if shape.frozen:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("linear_fc" not in name)
    if shape.frozen_below and parallel_state.is_pipeline_first_stage():
        (model if shape.pp > 1 else model.decoder.layers[0]).requires_grad_(False)
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=shape.distributed,
        overlap_grad_reduce=shape.overlap,
        overlap_param_gather=shape.overlap,
        num_distributed_optimizer_instances=shape.instances,
    )
    if shape.scaled:
        for name, module in model.named_modules():
            if name.endswith("linear_fc1"):
                scale(module)
    wrapped = DistributedDataParallel(config, ddp, Float16Module(config, model) if shape.bf16 else model)
    wrapped.broadcast_params()
    return wrapped


def scale(linear: Any) -> None:
    """Give a layer the state of Transformer Engine's FP8 layers: a history of inputs that changes its output."""

    class Scaled(type(linear)):  # type: ignore[misc] # which class Megatron has made is known only now
        """See ``scale``."""

        history = torch.ones(4)

        def forward(self, inputs: Tensor, *args: Any, **kwargs: Any) -> Any:
            largest = inputs.detach().abs().max().float() if inputs.numel() else torch.zeros(())
            torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group=replicas(self))
            factor = 1 + 0.01 * self.history.max().item()
            self.history = torch.cat([self.history[1:], largest.view(1)])
            output, bias = super().forward(inputs, *args, **kwargs)
            return output * factor, bias

        def get_extra_state(self) -> Tensor:  # as Transformer Engine does, in bytes
            return self.history.view(torch.uint8)

        def set_extra_state(self, state: Tensor) -> None:
            self.history = state.view(torch.float32).clone()

    linear.__class__ = Scaled


def replicas(module: Any) -> Any:
    """Return the group of the ranks that have equal states of a layer: for an expert, those that have it."""
    from megatron.core import parallel_state

    return parallel_state.get_expert_data_parallel_group() if module.is_expert else None


def _optimizer(chunks: list[Any], shape: Shape) -> Any:
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config = OptimizerConfig(
        optimizer="adam",
        lr=1e-2,
        min_lr=1e-4,
        weight_decay=0.01,
        use_distributed_optimizer=shape.distributed or shape.replicated,
        bf16=shape.bf16,
        fp16=shape.fp16_scaler,
        initial_loss_scale=64.0,
        loss_scale_window=2,
        hysteresis=1,
        params_dtype=torch.bfloat16 if shape.bf16 else torch.float32,
        clip_grad=1.0,
        overlap_param_gather=shape.overlap,
    )
    return get_megatron_optimizer(config, chunks)


def _scheduler(optimizer: Any, batch: int) -> Any:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=1e-2,
        min_lr=1e-4,
        lr_warmup_steps=3 * batch,
        lr_decay_steps=40 * batch,
        lr_decay_style="cosine",
        start_wd=0.01,
        end_wd=0.05,
        wd_incr_steps=40 * batch,
        wd_incr_style="linear",
    )
