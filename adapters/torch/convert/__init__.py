"""Implements ``ttp convert``: makes one file of a sharded checkpoint, or a checkpoint of a file. See ``conversion``."""
