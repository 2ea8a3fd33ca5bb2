"""Tools on files of MindSpore: resharding, recovery from redundancy, ``group_info.pb``. No part of the rescue."""
