"""A driver of Ray Train: two workers train, and one is killed. ``DIRECTORY STEPS KILLED_IN [plain]``.

``plain``: without ttp.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any


def train(config: dict[str, Any]) -> None:
    """What each worker does. Ray sends this function there, so it imports for itself."""
    import torch
    from ray import train as ray_train
    from torch.nn.parallel import DistributedDataParallel

    import ttp
    from ttp.testing.digests import digest

    place, rank = Path(config["directory"]), ray_train.get_context().get_world_rank()
    wide, protected = int(os.environ["JOB_WIDE"]), config["protected"]
    torch.set_num_threads(1)

    @ttp.ttp_to_persist
    def loop() -> None:
        torch.manual_seed(5)
        layers = torch.nn.Linear(8, wide), torch.nn.Dropout(0.2), torch.nn.Linear(wide, 64)
        model = DistributedDataParallel(torch.nn.Sequential(*layers))
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        torch.manual_seed(100 + rank)
        start = 0
        if protected:
            save_dir = str(place / "checkpoints")
            optimizer = ttp.wrap_optimizer(optimizer, model=model, scheduler=scheduler, save_dir=save_dir)
            start = ttp.restore()
        for step in range(start, config["steps"]):
            model(torch.randn(4, 8)).square().mean().backward()
            if (rank, step) == (0, config["killed_in"]) and not start:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        end = {"model": digest(model.state_dict()), "optimizer": digest(optimizer.state_dict()), "start": start}
        end["random stream"] = digest(torch.get_rng_state())
        (place / f"end{rank}.json").write_text(json.dumps(end))

    loop()


def main(directory: str, steps: int, killed_in: int, *, protected: bool) -> None:
    """Start a cluster of this machine alone, and train."""
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    callbacks: Any = []
    if protected:
        from ttp.ray import TtpCallback

        callbacks = [TtpCallback({"TTP_OT": "60", "TTP_STANDBYS": "0"})]
    ray.init(num_cpus=3, include_dashboard=False)
    config = {"directory": directory, "steps": steps, "killed_in": killed_in, "protected": protected}
    again = FailureConfig(max_failures=2)
    run_config = RunConfig(storage_path=f"{directory}/ray", failure_config=again, callbacks=callbacks)
    TorchTrainer(
        train, train_loop_config=config, scaling_config=ScalingConfig(num_workers=2), run_config=run_config
    ).fit()
    ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), protected=len(sys.argv) < 5)
