"""Clients of other makers, unmodified, through the gateway: `make clients` (see `run.py`)."""
