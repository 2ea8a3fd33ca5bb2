"""Converts a checkpoint of any layout to one full file, and such a file to a checkpoint. Start with ``conversion``."""
