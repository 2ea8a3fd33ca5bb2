"""MindSpore: its checkpoints, strategies and training loops."""
