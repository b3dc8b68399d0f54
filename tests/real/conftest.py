"""Tests against engines that are not ours: only by `make integration`; what is not installed is skipped by name."""

import os

collect_ignore_glob = [] if os.environ.get("WEIGHBRIDGE_ENGINES") else ["test_*.py"]
