"""What is inside a process group can be exchanged; a torch in which it cannot is refused, and nothing breaks."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from ttp.adapters.torch import regroup

_dist: Any = dist


def test_this_torch_lets_backends_be_exchanged() -> None:
    assert regroup.self_test() == ""


@pytest.mark.parametrize("breaks", ["nothing is registered", "it raises"])
def test_a_torch_that_does_not_is_refused(breaks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = regroup.register

    def register(group: Any, backend: Any, *, alone: bool, number: int) -> None:
        if alone:
            made(group, backend, alone=alone, number=number)
        elif breaks == "it raises":
            raise TypeError("no such number")

    monkeypatch.setattr(regroup, "register", register)
    assert regroup.self_test().startswith("this torch ")


def test_groups_that_nobody_has_seen_being_made_are_not_exchanged() -> None:
    helper = regroup._c10d._new_process_group_helper
    dist.init_process_group("gloo", store=_dist.HashStore(), rank=0, world_size=1)
    try:
        groups = regroup.Groups(seat=False)
        groups.enter()
        assert groups.why_not() == "process groups were made before @ttp_to_persist was met"
    finally:
        dist.destroy_process_group()
        regroup._c10d._new_process_group_helper = helper


def test_groups_of_the_loop_are_seen_and_a_seat_makes_its_groups_alone() -> None:
    stock = regroup._c10d._new_process_group_helper, regroup._c10d._store_based_barrier
    groups = regroup.Groups(seat=True)
    try:
        dist.init_process_group("gloo", store=_dist.HashStore(), rank=1, world_size=2)  # nobody else is there
        dist.barrier()
        groups.enter()
        assert groups.why_not() == ""
        assert regroup._c10d._store_based_barrier is stock[1]
        groups._before = []
        dist.destroy_process_group()
        groups.renew("nowhere", 0, 1, 1.0)  # nothing is left to be exchanged
    finally:
        regroup._c10d._new_process_group_helper, regroup._c10d._store_based_barrier = stock
