"""Values every layer shares: requests, events, actions, decisions, metrics, errors. Imports nothing of the rest."""
