"""``nn.OptTFTWrapper``, ``train.TFTRegister`` and ``train.TrainFaultTolerance`` of ``mindspore``, by ttp.

Importing this module installs them, now or when ``mindspore`` is imported; see docs/mindspore.md. MindSpore's own
classes run only on Ascend with the vendor's service, and 2.10 no longer has ``TFTRegister``. ``python -m
ttp.compat.mindspore script.py`` runs a program that knows nothing of this; ``ttp run --mindspore --mindio`` does the
same.
"""

from __future__ import annotations

from ttp.compat.mindspore.placing import put_into_place

put_into_place()
