"""Follows the training loop by hooks: the bracket around an update, the barrier, post-steps. Start with ``hooks``."""
