"""Adapters to training frameworks. Import them as ``ttp.adapters``; an adapter imports its framework, ttp does not."""
