"""Writes shards as ``.distcp`` files, which stock torch reads. Start with ``checkpoint``."""
