"""Web UI over the admin API and event logs; it writes nothing."""
