"""Megatron: ``protect`` for programs built on megatron-core, ``install`` for Megatron-LM's own training loop."""

from ttp.adapters.megatron.export import offer_to_megatron as offer_to_megatron
from ttp.adapters.megatron.training import install as install
from ttp.adapters.megatron.training import protect as protect
