"""A driver of Ray Train: two workers train, and one is killed. ``DIRECTORY STEPS KILLED_IN [plain|drain|broken]``.

``plain``: without ttp; ``drain``: a cluster of three nodes, one of which is drained after step ``KILLED_IN``, without a
kill; ``broken``: the program fails in each launch before its first step.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any


def train(config: dict[str, Any]) -> None:
    """Train on one worker. Ray sends this function to its workers, so it imports for itself."""
    import ray
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
        (place / f"node{rank}").write_text(ray.get_runtime_context().get_node_id())
        if protected:
            save_dir = str(place / "checkpoints")
            optimizer = ttp.wrap_optimizer(optimizer, model=model, scheduler=scheduler, save_dir=save_dir)
            start = ttp.restore()
        with (place / f"launches{rank}").open("a") as launches:
            launches.write(f"{ray_train.get_context().get_node_rank()} {start}\n")
        for step in range(start, config["steps"]):
            model(torch.randn(4, 8)).square().mean().backward()
            if (rank, step) == (0, config["killed_in"]) and not start and config["how"] != "drain":
                os.kill(os.getpid(), signal.SIGKILL)
            if config["how"] == "broken":
                raise ValueError("a fault of the program")
            if config["how"] == "drain":
                (place / f"at{rank}").write_text(str(step))
                while not start and step > config["killed_in"] and not (place / "drained").exists():
                    time.sleep(0.1)
                time.sleep(1)  # Ray looks for notices now and then
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        end = {"model": digest(model.state_dict()), "optimizer": digest(optimizer.state_dict()), "start": start}
        end["random stream"] = digest(torch.get_rng_state())
        (place / f"end{rank}.json").write_text(json.dumps(end))

    loop()


def drain_one(cluster: Any, place: Path, step: int) -> None:
    """Drain a node with Ray's command, as a cloud does when it takes a node away."""
    while not (place / "at0").exists() or int((place / "at0").read_text() or 0) < step:
        time.sleep(0.05)
    reason = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "it is taken away"]
    command = ["drain-node", "--address", cluster.address, "--node-id", (place / "node0").read_text(), *reason]
    subprocess.run([Path(sys.executable).with_name("ray"), *command, "--deadline-remaining-seconds", "90"], check=True)
    (place / "drained").touch()


def main(directory: str, steps: int, killed_in: int, how: str) -> None:
    """Start a cluster of this machine alone, and train."""
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    callbacks: Any = []
    if how != "plain":
        from ttp.ray import TtpCallback

        callbacks = [TtpCallback({"TTP_OT": "60", "TTP_STANDBYS": "0"})]
    scaling = ScalingConfig(num_workers=2)
    if how == "drain":
        from ray.cluster_utils import Cluster

        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        for _ in range(3):
            cluster.add_node(num_cpus=1, resources={"seat": 1})
        ray.init(address=cluster.address)
        scaling = ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1, "seat": 1})
        threading.Thread(target=drain_one, args=(cluster, Path(directory), killed_in), daemon=True).start()
    else:
        ray.init(address="local", num_cpus=3, include_dashboard=False)
    config = {"directory": directory, "steps": steps, "killed_in": killed_in, "how": how, "protected": how != "plain"}
    again = FailureConfig(max_failures=8)
    run_config = RunConfig(storage_path=f"{directory}/ray", failure_config=again, callbacks=callbacks)
    TorchTrainer(train, train_loop_config=config, scaling_config=scaling, run_config=run_config).fit()
    ray.shutdown()
    if how == "drain":
        cluster.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] if len(sys.argv) > 4 else "")
