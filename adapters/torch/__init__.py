"""The torch adapter: hooks around an update, capture of what one rank has, checkpoints that stock torch reads."""

from ttp.adapters.torch.sharding.replicated_optimizer import ReplicatedOptimizer as ReplicatedOptimizer
