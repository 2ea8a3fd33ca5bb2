"""``nn.OptTFTWrapper``, ``train.TFTRegister`` and ``train.TrainFaultTolerance`` of ``mindspore``, by ttp.

Importing this puts them into place, now or when ``mindspore`` is imported; see docs/mindspore.md. MindSpore's own run
on Ascend with the vendor's service only, and 2.10 has no ``TFTRegister`` any more. ``python -m ttp.compat.mindspore
script.py`` runs a program that knows nothing of this, which is what ``ttp run --mindspore --mindio`` does.
"""

from __future__ import annotations

from ttp.compat.mindspore.placing import put_into_place

put_into_place()
