"""One rank with a few steps, for failures before and after training. Run by the tests.

``python solo.py SAVE_DIR STEPS [WIDTH]``: prints ``start N``, trains, prints ``weights DIGEST``. ``SOLO_SAVE``: the
step after which it asks for a checkpoint; ``SOLO_FSIZE``: from then on no file may be larger, as on a full disk;
``SOLO_TELL``: prints ``trained`` after its first step; ``SOLO_MISUSE``: the
step after which it makes a forbidden call; ``SOLO_ODD``: its optimizer has state that cannot be saved;
``SOLO_STRANGER``: it gets a parameter that the model does not have; ``SOLO_NOTES``: a file to which it writes each
version; its steps and the end of the process take 0.4 s.
"""

from __future__ import annotations

import hashlib
import logging
import os
import resource
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import ttp


class SlowEnd(logging.NullHandler):
    """A log that is long in closing."""

    def close(self) -> None:
        time.sleep(0.4)
        super().close()


@ttp.ttp_to_persist
def train(save_dir: str, steps: int, width: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Dropout(0.5), nn.Linear(width, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if os.environ.get("SOLO_ODD"):
        optimizer.register_step_post_hook(lambda *_: optimizer.state[next(model.parameters())].update(odd=object()))
    average = get_ema_multi_avg_fn(0.9)  # type: ignore[no-untyped-call]
    ema = AveragedModel(model, multi_avg_fn=average, use_buffers=False)
    ttp.wrap_optimizer(optimizer, model=model, save_dir=save_dir, extra_state={"ema": ema})
    start = ttp.restore()
    print("start", start, flush=True)
    for step in range(start, steps):
        data = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(data).square().mean().backward()
        notes = os.environ.get("SOLO_NOTES")
        if notes:
            time.sleep(0.4)
        optimizer.step()
        if notes:
            Path(notes).write_text(str(step + 1))
        ema.update_parameters(model)
        if os.environ.get("SOLO_STEP_DONE"):
            ttp.step_done()
        if step == start and os.environ.get("SOLO_STRANGER"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
        if step == start and os.environ.get("SOLO_TELL"):
            print("trained", flush=True)
        if step + 1 == int(os.environ.get("SOLO_MISUSE", "-1")):
            ttp.wrap_optimizer(optimizer, model=model if "TTP_PORT" in os.environ else None, save_dir=save_dir)
        if step + 1 == int(os.environ.get("SOLO_SAVE", "-1")):
            limit = int(os.environ.get("SOLO_FSIZE", "0"))
            if limit:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            save_now()
    for what, module in (("weights", model), ("average", ema)):
        digest = hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in module.state_dict().values()))
        print(what, digest.hexdigest(), flush=True)


def save_now() -> None:
    """Request a checkpoint as ``ttp save`` does. The processor answers the freeze while this thread waits."""
    from ttp.wire.channel import metadata, open_channel, stub
    from ttp.wire.v1 import controller_pb2 as pb

    with open_channel("127.0.0.1", int(os.environ["TTP_PORT"])) as channel:
        answer = stub(channel).SaveNow(
            pb.SaveNowRequest(), metadata=metadata(os.environ.get("TTP_TOKEN", "")), timeout=60
        )
    print("saved" if answer.saved else "not saved", answer.version, answer.path, answer.text, flush=True)


def main() -> None:
    """Run the job that the command line describes."""
    if os.environ.get("SOLO_NOTES"):
        logging.root.addHandler(SlowEnd())
    train(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 16)


if __name__ == "__main__":
    main()
