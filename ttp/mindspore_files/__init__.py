"""Tools for MindSpore's checkpoint files: read, write, reshard, recover from replicas. Rescues use only the writer."""
