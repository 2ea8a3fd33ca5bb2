"""Where ttp touches the training loop: hooks, the bracket around an update, the barrier. Start with ``hooks``."""
