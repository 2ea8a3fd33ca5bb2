"""The torch adapter: hooks around an update, capture of rank-local state, checkpoints that stock torch reads."""

from ttp.adapters.torch.sharding.replicated_optimizer import ReplicatedOptimizer as ReplicatedOptimizer
