"""The ``ttp`` command. A training process imports nothing from this package."""
