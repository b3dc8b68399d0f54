"""Seconds: the step-time model of an instance, KV bytes, transfer time, and the profile file that keeps them."""
