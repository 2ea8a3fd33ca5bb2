"""Tools for MindSpore's files: resharding, recovery from redundancy, ``group_info.pb``. Not part of the rescue."""
