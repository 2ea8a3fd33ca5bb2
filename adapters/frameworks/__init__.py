"""Trainers that other projects provide. Each module imports its framework when it is loaded; see docs/frameworks.md."""
