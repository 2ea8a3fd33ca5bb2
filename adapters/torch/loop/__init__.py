"""Follows the training loop with hooks: the bracket around an update, the barrier, post-steps. Start with ``hooks``."""
