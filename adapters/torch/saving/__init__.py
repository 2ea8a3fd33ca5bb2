"""Writes shards as ``.distcp`` files that stock torch reads. Start with ``checkpoint``."""
