"""How much memory, how much load, how many instances."""
