"""Makes a directory ``checkpoint-N``, from which a Trainer resumes, from a checkpoint of ttp."""

from __future__ import annotations

import importlib
import inspect
import json
import logging
import random
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ttp import session
from ttp.adapters.torch.convert.contents import tree
from ttp.adapters.torch.convert.from_checkpoint import read_checkpoint
from ttp.adapters.torch.local_state.image import read_local_state
from ttp.adapters.versions import numbers
from ttp.core.layout import Rank
from ttp.core.restore_choice import is_fallback_note, too_new
from ttp.core.restore_messages import RestoreView
from ttp.errors import CheckpointError, ConfigError
from ttp.store.choice import look_back
from ttp.store.encoding import decode
from ttp.store.manifest import Manifest
from ttp.store.writable import absolute

log = logging.getLogger("ttp.adapters.frameworks")

NAME = "ttp.hf"
"""Name of the Trainer's state among the extra states."""

_FSDP_MODEL = "pytorch_model_fsdp"
"""Accelerate's name for the file or directory with the model of an FSDP training."""


def refuse(trainer: Any) -> None:
    """Raise ``ConfigError`` if a training with these arguments could not resume with its bits."""
    transformers = importlib.import_module("transformers").__version__
    accelerate = importlib.import_module("accelerate").__version__
    if numbers(transformers) < (5, 0) and numbers(accelerate) < (1, 15):
        raise ConfigError(
            f"transformers {transformers} with accelerate {accelerate} resumes in the middle of any epoch "
            "with the data in the order of the first epoch: install accelerate>=1.15"
        )
    refused = {
        "enable_jit_checkpoint": "installs its own SIGTERM handler, which would prevent ttp from saving",
        "auto_find_batch_size": "begins the training again in the same process, which ttp does not support",
    }
    for name, why in refused.items():
        if getattr(trainer.args, name, False):
            raise ConfigError(f"TrainingArguments({name}=True) {why}: switch it off")
    for name in ("is_deepspeed_enabled", "is_fsdp_xla_enabled"):
        if getattr(trainer, name, False):
            raise ConfigError(
                f"ttp.hf protects a Trainer with DistributedDataParallel or FSDP, and this Trainer has {name}: write "
                "the loop with ttp.deepspeed or ttp.wrap_optimizer"
            )
    plugin = fsdp_plugin(trainer)
    if plugin is not None and "LOCAL" in str(plugin.state_dict_type):
        raise ConfigError(
            "fsdp_config: state_dict_type LOCAL_STATE_DICT fits one number of ranks only, and ttp resumes on any "
            "number: use FULL_STATE_DICT or SHARDED_STATE_DICT"
        )


def choose(trainer: Any, save_dir: Any) -> dict[str, Any]:
    """Choose the newest checkpoint, of ttp or of the Trainer itself, and return a directory to resume from.

    Only rank 0 calls it. For a checkpoint of ttp it makes the directory.

    Args:
        trainer: the Trainer.
        save_dir: the directory of ttp's checkpoints, unless ``TTP_SAVE_DIR`` is set.

    Returns:
        A dict with ``version`` (0: none of ttp was chosen) and, if there is a checkpoint, ``directory``. For a
        checkpoint of ttp also with ``step``, ``stage`` (index of the mark) and ``mark``, see ``hf``; for one of the
        Trainer itself with ``foreign``.

    Raises:
        CheckpointError: the newest checkpoint of ttp has no state of a Trainer; or a checkpoint that is newer than the
            Trainer's own was saved by a newer ttp.
    """
    current = session.current()
    place = absolute(str(current.config.save_dir or save_dir))
    found = look_back(place, current.fallback_dir)
    own = None if trainer.args.save_only_model else _newest_of_trainer(trainer.args.output_dir)
    newest = found.candidates[0] if found.candidates else None
    facts: dict[str, Any] = {"step": -1}
    if newest is not None:
        checkpoint = found.where[newest]
        facts = _agreed(checkpoint, Manifest.load(checkpoint))
    if own is not None and (step := int(own.name.rpartition("-")[2])) > facts["step"]:
        newer, why = too_new([RestoreView(Rank(0), found.candidates, found.skipped)])
        if newer > step:
            raise CheckpointError(why)
        for reason in (text for text in found.skipped if not is_fallback_note(text)):
            log.warning("restore skipped %s; the Trainer's own %s is restored", reason, own)
        return {"version": 0, "directory": str(own), "foreign": True}
    if newest is None:
        return {"version": 0}
    return {"version": int(newest.version), "directory": str(_write(trainer, checkpoint, facts)), **facts}


def _newest_of_trainer(output_dir: str) -> Path | None:
    """Return the Trainer's newest finished checkpoint, which has the file that the Trainer writes last; None: none."""
    found = [path.parent for path in Path(output_dir).glob("checkpoint-*/trainer_state.json")]
    steps = [(int(path.name.rpartition("-")[2]), path) for path in found if path.name.rpartition("-")[2].isdigit()]
    return max(steps)[1] if steps else None


def _agreed(checkpoint: Path, manifest: Manifest) -> dict[str, Any]:
    """Return the step that ended the version, its last mark that every rank had, and the log up to this mark."""
    locals_ = [read_local_state(checkpoint, manifest.pieces, rank) for rank in range(manifest.world_size)]
    states = [decode(each.extra[NAME]) for each in locals_ if each is not None and NAME in each.extra]
    states = [each for each in states if each["marks"]]
    if not states:
        raise CheckpointError(f"{checkpoint} holds no state of a Trainer: a program without ttp.hf has saved it")
    step = max(each["step"] for each in states)
    here = [each for each in states if each["step"] == step]
    stage = min(len(each["marks"]) for each in here) - 1 if len(here) == manifest.world_size else 0
    mark = here[0]["marks"][stage]
    log_lines = [decode(line) for line in here[0]["log"][: mark["logged"]]]
    return {"step": step, "stage": stage, "mark": mark, "log": log_lines}


def _write(trainer: Any, checkpoint: Path, facts: dict[str, Any]) -> Path:
    place = checkpoint.parent / "trainer"
    final, draft = place / f"checkpoint-{facts['step']}", place / ".new"
    shutil.rmtree(draft, ignore_errors=True)
    for old in place.glob("checkpoint-*"):
        # The checkpoint of ttp from which it was made stays; the disk may have no room for two directories.
        shutil.rmtree(old, ignore_errors=True)
    draft.mkdir(parents=True)
    if fsdp_plugin(trainer) is None:
        _write_model(trainer, draft, _model(checkpoint))
    else:
        _write_for_fsdp(trainer, draft, checkpoint)
    (draft / "trainer_state.json").write_text(
        json.dumps(_trainer_state(facts), indent=2, sort_keys=True, default=float)
    )
    draft.rename(final)
    return final


def fsdp_plugin(trainer: Any) -> Any:
    """Return Accelerate's FSDP plugin, which describes the sharding; None: the model is not sharded."""
    return getattr(getattr(trainer, "accelerator", None) and trainer.accelerator.state, "fsdp_plugin", None)


def _model(checkpoint: Path) -> dict[str, Any]:
    found: dict[str, Any] = tree(read_checkpoint(checkpoint).below("model"), lambda tensor: tensor.read())["model"]
    return found


def _write_for_fsdp(trainer: Any, directory: Path, checkpoint: Path) -> None:
    """Write the model for ``accelerate.utils.load_fsdp_model``: one file, or for DCP a link to ``checkpoint``."""
    if "FULL" in str(fsdp_plugin(trainer).state_dict_type):
        torch.save(_model(checkpoint), directory / f"{_FSDP_MODEL}.bin")
    else:
        (directory / f"{_FSDP_MODEL}_0").symlink_to(checkpoint.absolute(), target_is_directory=True)
    trainer.model.config.save_pretrained(directory)


def _write_model(trainer: Any, directory: Path, saved: dict[str, Any]) -> None:
    """Write the model. ``save_pretrained`` is used if there is one: it handles tied weights and the names on disk."""
    model = trainer.model
    named = {name: saved[name] for name in model.state_dict() if name in saved}
    if hasattr(model, "save_pretrained"):
        takes = inspect.signature(model.save_pretrained).parameters
        if "state_dict" in takes or any(each.kind is each.VAR_KEYWORD for each in takes.values()):
            model.save_pretrained(directory, state_dict=named)
        else:  # it writes the model's own weights, as sentence-transformers' does
            model.load_state_dict(named, strict=False)
            model.save_pretrained(directory)
    else:
        from safetensors.torch import save_file

        once = {id(tensor): name for name, tensor in reversed(named.items())}
        save_file(
            {n: t.contiguous() for n, t in named.items() if once[id(t)] == n},
            directory / "model.safetensors",
            {"format": "pt"},
        )
    if getattr(trainer, "processing_class", None) is not None:
        with suppress(AttributeError):
            trainer.processing_class.save_pretrained(directory)


def _trainer_state(facts: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of ``TrainerState`` in the form in which the Trainer writes them."""
    mark = facts["mark"]
    callbacks: dict[str, Any] = {}
    for name, kept in [*mark["callbacks"], ["TrainerControl", {"args": mark["control"], "attributes": {}}]]:
        callbacks.setdefault(name, []).append(kept)
    stateful = {name: several[0] if len(several) == 1 else several for name, several in callbacks.items()}
    return {**mark["state"], "log_history": facts.pop("log"), "stateful_callbacks": stateful}


def complete(directory: str, trainer: Any) -> None:
    """Add the files that the Trainer needs to resume without ttp: random streams, scheduler, scaler, optimizer.

    ttp has already restored this state in the process. The Trainer reads the file with the random streams of each
    process when it begins to train, so that file must be written. If one of the other, larger files cannot be written
    (a full disk), training continues, and the log says so.

    Args:
        directory: the ``checkpoint-N``.
        trainer: the Trainer, with restored objects.

    Raises:
        OSError: the file with the random streams cannot be written.
    """
    args, scaler = trainer.args, getattr(trainer.accelerator, "scaler", None)
    states: dict[str, Any] = {"python": random.getstate(), "numpy": np.random.get_state()}
    states["cpu"] = torch.get_rng_state()
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state_all() if args.world_size > 1 else torch.cuda.get_rng_state()
    name = f"rng_state_{args.process_index}.pth" if args.world_size > 1 else "rng_state.pth"
    torch.save(states, Path(directory) / name)
    if args.process_index == 0:
        named = {"scheduler.pt": trainer.lr_scheduler, "scaler.pt": scaler}
        named |= {} if fsdp_plugin(trainer) is not None else {"optimizer.pt": trainer.optimizer}
        for name, kept in named.items():
            if kept is not None:
                _save(kept.state_dict(), Path(directory) / name)


def _save(state: Any, path: Path) -> None:
    try:
        torch.save(state, path)
    except Exception as problem:
        log.warning("the Trainer alone cannot resume from %s: %s", path.parent, problem)
        with suppress(OSError):
            path.unlink()


def complete_shards(directory: str, trainer: Any) -> None:
    """Write the shards of all ranks with Accelerate's functions; do nothing without FSDP. All ranks call it.

    Call it before an evaluation, because FSDP2 holds whole weights after one. A link to the checkpoint of ttp is
    replaced by a copy of the model, because ttp removes old checkpoints.
    """
    plugin = fsdp_plugin(trainer)
    if plugin is None:
        return
    from accelerate.utils import save_fsdp_model, save_fsdp_optimizer

    link = Path(directory) / f"{_FSDP_MODEL}_0"
    if link.is_symlink():
        trainer.accelerator.wait_for_everyone()
        if trainer.args.process_index == 0:
            link.unlink()
        trainer.accelerator.wait_for_everyone()
        save_fsdp_model(plugin, trainer.accelerator, trainer.model, directory)
    save_fsdp_optimizer(plugin, trainer.accelerator, trainer.optimizer, trainer.model, directory)
