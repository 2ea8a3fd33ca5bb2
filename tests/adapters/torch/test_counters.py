"""What the host counts while its device hangs is put back to the version that is saved."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from ttp.adapters.torch.counters import counted_back  # noqa: E402
from ttp.errors import CheckpointError  # noqa: E402


def trained(kind: Any, updates: int, **options: Any) -> dict[str, Any]:
    """``state`` and ``param_groups`` of an optimizer of two parameters, by names."""
    torch.manual_seed(0)
    parameters = {name: torch.nn.Parameter(torch.randn(3)) for name in "ab"}
    optimizer = kind(parameters.values(), **options)
    for _ in range(updates):
        for parameter in parameters.values():
            parameter.grad = torch.randn(3)
        optimizer.step()
    (group,) = optimizer.param_groups
    return {
        "state": {name: dict(optimizer.state[parameter]) for name, parameter in parameters.items()},
        "param_groups": [{**group, "params": list(parameters)}],
    }


def on_host(tensor: Any) -> bool:
    return bool(tensor.dim() == 0)  # the rest lies on the device


NADAM = torch.optim.NAdam


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"betas": (0.7, 0.99), "momentum_decay": 0.1}])
@pytest.mark.parametrize(("count", "ahead"), [(1, 1), (2, 1), (7, 3), (400, 2)])
def test_nadam(options: dict[str, Any], count: int, ahead: int) -> None:
    found = counted_back(trained(NADAM, count, **options), ahead, on_host)
    expected = trained(NADAM, count - ahead, **options)["state"] if count > ahead else None
    for name in "ab":
        assert found[name]["step"] == count - ahead
        product = torch.ones(()) if expected is None else expected[name]["mu_product"]
        assert torch.equal(found[name]["mu_product"], product)


def test_other_rates_in_between_are_noticed() -> None:
    optim = trained(NADAM, 5)
    optim["param_groups"][0]["betas"] = (0.5, 0.9)
    with pytest.raises(
        CheckpointError, match=r"2 updates ahead .* optimizer.state\[a\]\['mu_product'\] is on the host"
    ):
        counted_back(optim, 2, on_host)


def test_adam_counts_its_steps_only() -> None:
    optim = trained(torch.optim.Adam, 5)
    found = counted_back(optim, 2, on_host)
    assert found["a"]["step"] == 3 and found["a"]["exp_avg"] is optim["state"]["a"]["exp_avg"]


def test_what_nobody_knows_is_refused() -> None:
    optim = trained(torch.optim.Adam, 5)
    optim["state"]["b"]["scale"] = torch.tensor(2.0)
    with pytest.raises(CheckpointError, match="what it was then is not known"):
        counted_back(optim, 1, on_host)
