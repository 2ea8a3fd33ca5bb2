"""Finds which shards of the training state each rank holds, and the replica groups. Start with ``sharding``."""
