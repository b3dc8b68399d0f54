"""Which model answers, before the router picks the instance."""
