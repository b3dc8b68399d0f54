"""One file per CLI command; each exposes `register(app)`."""
