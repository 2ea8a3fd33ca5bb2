"""The ``ttp`` command. Nothing here is imported by a training process."""
