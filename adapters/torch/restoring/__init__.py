"""Loads a checkpoint into a live model, optimizer and so on. Start with ``restore``."""
