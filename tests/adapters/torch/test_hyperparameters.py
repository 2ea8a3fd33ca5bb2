"""The hyperparameters of param groups are copied once for each change."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from torch import nn

from ttp.adapters.torch.local_state import hyperparameters
from ttp.adapters.torch.local_state.hyperparameters import hyperparameters_of


class TestHyperparameters:
    def optimizer(self, **settings: Any) -> Any:
        parameters = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
        return torch.optim.AdamW([{"params": [p]} for p in parameters], lr=0.1, **settings)

    def test_what_has_not_changed_is_not_taken_again(self) -> None:
        optimizer = self.optimizer()
        first = hyperparameters_of([optimizer])
        again = hyperparameters_of([optimizer], first)
        assert again is first

    @pytest.mark.parametrize("few", [0, 32], ids=["lists", "dictionaries"])
    def test_earlier_ones_stay_as_they_were(self, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(hyperparameters, "_FEW", few)
        optimizer = self.optimizer()
        seen, states = hyperparameters_of([optimizer]), list[Any]()
        changes: list[dict[str, Any]] = [{"lr": 0.2}, {"betas": (0.5, 0.6)}, {"initial_lr": 0.1}, {"lr": 0.3}]
        for change in changes:
            optimizer.param_groups[1].update(change)
            seen = hyperparameters_of([optimizer], seen)
            states.append((seen, [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]))
            optimizer.param_groups[1]["other"] = optimizer.param_groups[1].pop("initial_lr", 0.1)
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))], "lr": 9.0})
        assert len(hyperparameters_of([optimizer], seen)[0].groups()) == 4
        for taken, expected in states:
            assert taken[0].groups() == expected

    @pytest.mark.parametrize("rate", [torch.tensor(0.5), numpy.full((), 0.5)])
    def test_values_that_change_in_place_are_copied(self, rate: Any) -> None:
        optimizer = self.optimizer()
        optimizer.param_groups[0]["lr"] = rate
        before = hyperparameters_of([optimizer])
        rate += 1
        after = hyperparameters_of([optimizer], before)
        assert [float(each[0].groups()[0]["lr"]) for each in (before, after)] == [0.5, 1.5]

    def test_other_parameters_in_a_group(self) -> None:
        """Lists of tensors cannot be compared with ``==``."""
        optimizer = self.optimizer()
        before = hyperparameters_of([optimizer])
        optimizer.param_groups[0]["params"] = [nn.Parameter(torch.ones(2))]
        assert hyperparameters_of([optimizer], before)[0].groups() == before[0].groups()
