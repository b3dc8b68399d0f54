"""Driver in virtual time: event heap, simulated instances, experiments."""
