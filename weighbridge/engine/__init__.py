"""The embedded engine: the scheduler and a llama.cpp runner behind an OpenAI server."""
