"""Train a tiny GPT-2 of Hugging Face on sonnets with their Trainer; the death of a rank costs no step. See README.md.

ttp run --nproc-per-node 2 --max-restarts 3 examples/hf_trainer/train_hf.py
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import ttp

TEXT = Path(__file__).parents[1] / "gpt" / "sonnets.txt"
LENGTH = 32


def sentences(count: int, first: int = 0) -> list[dict[str, Any]]:
    """Return ``count`` pieces of the text, from piece ``first`` on; a letter is a token."""
    text = TEXT.read_text()
    letters = sorted(set(text))
    tokens = torch.tensor([letters.index(letter) for letter in text])
    pieces = tokens[first * LENGTH : (first + count) * LENGTH].view(count, LENGTH)
    return [{"input_ids": piece, "labels": piece} for piece in pieces]


def make_trainer(output_dir: Path, sequences: int = 64, **arguments: Any) -> Trainer:
    """Return a Trainer. Nothing in this function belongs to ttp."""
    small = {"n_positions": LENGTH, "n_embd": 32, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(vocab_size=len(set(TEXT.read_text())), **small)
    plain = {"per_device_train_batch_size": 2, "num_train_epochs": 2, "logging_steps": 2, "report_to": []}
    settings = TrainingArguments(str(output_dir), **{**plain, "save_strategy": "no", "disable_tqdm": True, **arguments})
    torch.manual_seed(settings.seed)
    return Trainer(
        GPT2LMHeadModel(config), settings, train_dataset=sentences(sequences), eval_dataset=sentences(8, sequences)
    )


@ttp.ttp_to_persist  # 1
def train(trainer: Trainer, save_dir: Path, **settings: Any) -> None:
    trainer.add_callback(ttp.hf.TtpCallback(save_dir, **settings))  # 2
    trainer.train(resume_from_checkpoint=ttp.hf.resume_directory(trainer))  # 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save-dir", type=Path, default=Path("checkpoints"), help="where ttp saves")
    parser.add_argument("--output-dir", type=Path, default=Path("trainer_output"), help="where the Trainer does")
    parser.add_argument("--sequences", type=int, default=512, help="of 32 letters each, to train on")
    options = parser.parse_args()
    trainer = make_trainer(options.output_dir, options.sequences, use_cpu=not torch.cuda.is_available())
    train(trainer, options.save_dir)


if __name__ == "__main__":
    main()
