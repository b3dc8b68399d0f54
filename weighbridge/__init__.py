"""Weighbridge: an LLM request router that calibrates, then routes."""

__version__ = "0.1.0"
