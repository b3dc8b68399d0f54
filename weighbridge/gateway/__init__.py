"""Driver in wall time: OpenAI surface, relay, engine adapters, health, admin API."""
