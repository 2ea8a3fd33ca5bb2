"""Which rank holds what of the training state, and which ranks hold the same. Start with ``sharding``."""
