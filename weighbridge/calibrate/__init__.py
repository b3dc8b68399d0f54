"""Probe an instance, fit its cost model, watch it drift."""
