"""Replace MindSpore's ``nn.OptTFTWrapper``, ``train.TFTRegister`` and ``train.TrainFaultTolerance`` by ttp's classes.

Importing this module does that, now or when ``mindspore`` is imported; see docs/mindspore.md. MindSpore's own classes
run only on Ascend with the vendor's service, and 2.10 no longer has ``TFTRegister``. ``python -m ttp.compat.mindspore
script.py`` runs an unchanged program with ttp's classes, as does ``ttp run --mindspore --mindio``.
"""

from __future__ import annotations

from ttp.compat.mindspore.placing import put_into_place

put_into_place()
