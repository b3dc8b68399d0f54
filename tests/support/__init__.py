"""Helpers of the tests: fakes that speak real bytes over loopback."""
