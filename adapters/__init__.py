"""Adapters to training frameworks. Import them as ``ttp.adapters``; each imports its framework when it is loaded."""
