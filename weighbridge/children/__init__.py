"""Child processes that are kept running: started again when they die, killed when they stand still."""

from weighbridge.children.kept_child import KeptChild, Patience

__all__ = ["KeptChild", "Patience"]
