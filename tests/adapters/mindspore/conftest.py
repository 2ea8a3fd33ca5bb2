from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return checkpoints of eight ranks, of eight with optimizer parallelism, of four, and of a pipeline."""
    from tests.adapters.mindspore.reshard_worlds import PP, S4, S8, S8O, TENSORS, save

    made = {name: tmp_path_factory.mktemp(name) for name in ("s8", "s8o", "s4", "pp")}
    for name, cuts, ranks in (("s8", S8, 8), ("s8o", S8O, 8), ("s4", S4, 4)):
        save(made[name], TENSORS, cuts, range(ranks))
    for stage, cuts in enumerate(PP):
        save(made["pp"], {n: TENSORS[n] for n in cuts}, cuts, range(4 * stage, 4 * stage + 4), first=4 * stage)
    return made
