"""Regression with TensorFlow, restarted as a job: every worker resumes from TensorFlow's own last checkpoint.

Usage: python train_tf.py SAVE_DIR [STEPS]. This runs one worker; for several workers set TF_CONFIG, see job.sh.

ttp has no adapter to TensorFlow: when a worker dies, nothing is saved from the replicas, and the steps since the last
checkpoint are repeated. On SIGTERM the script saves the running step, and exits with ttp's code for "saved": 75.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import tensorflow as tf  # type: ignore[import-untyped]

SAVED = 75
EVERY = 20
BATCH = 32


def main() -> None:
    save_dir, steps = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 200
    cluster = json.loads(os.environ.get("TF_CONFIG", "{}"))
    rank = int(cluster.get("task", {}).get("index", 0))
    strategy: Any = tf.distribute.MultiWorkerMirroredStrategy() if cluster else tf.distribute.get_strategy()
    with strategy.scope():
        weights, bias = tf.Variable(tf.zeros((8, 1))), tf.Variable(0.0)
        step = tf.Variable(0, dtype=tf.int64)
    checkpoint = tf.train.Checkpoint(weights=weights, bias=bias, step=step)
    # every worker takes part in a save; only the chief's files are read
    folder = save_dir if rank == 0 else save_dir / f"worker-{rank}"
    manager = tf.train.CheckpointManager(checkpoint, folder, max_to_keep=3)
    begun = newest_that_loads(checkpoint, save_dir)
    print(f"worker {rank}: begins at step {begun}", flush=True)

    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))

    @tf.function  # type: ignore[untyped-decorator]
    def train_step(number: Any) -> Any:
        def replica() -> Any:
            context = tf.distribute.get_replica_context()
            seed = tf.stack([number, tf.cast(context.replica_id_in_sync_group, tf.int64)])
            x = tf.random.stateless_normal((BATCH, 8), seed)
            y = tf.reduce_sum(x, 1, keepdims=True) + 1.0
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((x @ weights + bias - y) ** 2)
            gradients = tape.gradient(loss, [weights, bias])
            summed = context.all_reduce(tf.distribute.ReduceOp.MEAN, [*gradients, loss])
            weights.assign_sub(0.05 * summed[0])
            bias.assign_sub(0.05 * summed[1])
            return summed[2]

        return strategy.run(replica)

    for number in range(begun, steps):
        loss = float(strategy.experimental_local_results(train_step(tf.constant(number, tf.int64)))[0])
        step.assign(number + 1)
        if asked or (number + 1) % EVERY == 0 or number + 1 == steps:
            manager.save(checkpoint_number=number + 1)
            print(f"worker {rank}: step {number + 1} saved, loss {loss:.6f}", flush=True)
        if asked:
            sys.exit(SAVED)


def newest_that_loads(checkpoint: Any, save_dir: Path) -> int:
    """Restore the newest checkpoint that can be read, of the last five, and return its step; 0: there is none."""
    state = tf.train.get_checkpoint_state(str(save_dir))
    for path in reversed(list(state.all_model_checkpoint_paths)[-5:] if state else []):
        try:
            checkpoint.restore(path).assert_existing_objects_matched()
            return int(checkpoint.step.numpy())
        except (tf.errors.OpError, AssertionError, ValueError, IndexError) as problem:  # IndexError: a truncated file
            print(f"{path} is passed over: {problem!s:.200}", flush=True)
    return 0


if __name__ == "__main__":
    main()
