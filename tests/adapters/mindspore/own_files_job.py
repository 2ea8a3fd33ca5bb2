"""The example job with its own functions to save and load, as ``TrainFaultTolerance`` of MindSpore 2.10 takes them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import mindspore as ms

sys.path.insert(0, str(Path(__file__).parent))

from mnist_job import kills, train_mnist  # type: ignore[import-not-found] # beside this file

from ttp.adapters.mindspore import TrainFaultTolerance, restore

OWN = Path("own")


def save(cb_params: Any, append_dict: dict[str, Any]) -> None:
    """Write one file, named after step and rank. It is renamed when it is whole, as MindSpore does."""
    OWN.mkdir(exist_ok=True)
    file = OWN / f"{append_dict['step_num']}-{append_dict['cur_rank']}.ckpt"
    ms.save_checkpoint(cb_params.train_network, str(file), integrated_save=False, append_dict=append_dict)
    print(f"saved {sorted(append_dict)}", flush=True)


def load() -> tuple[dict[str, Any], bool]:
    newest = max(OWN.glob("*.ckpt"), key=lambda file: int(file.name.partition("-")[0]))
    return ms.load_checkpoint(str(newest)), False


def callback(_rank: int, _address: str, _port: int, _path: str) -> TrainFaultTolerance:
    return TrainFaultTolerance(ckpt_save_fn=save, ckpt_load_fn=load)


def resume(model: Any, dataset: Any, path: str) -> Any:
    return restore(model, dataset, path, ckpt_load_fn=load)


if __name__ == "__main__":
    train_mnist.TFTRegister, train_mnist.restore = callback, resume
    train_mnist.main(callbacks=kills())
