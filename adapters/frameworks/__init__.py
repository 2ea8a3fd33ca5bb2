"""Adapters to the trainers of other projects. Each module imports its framework; see docs/frameworks.md."""
