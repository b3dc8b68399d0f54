"""Open-loop load generator, verdict and reports."""
