"""Traces and generators: arrival processes, lengths, prefixes, tiers and tenants. Pure and seeded."""
