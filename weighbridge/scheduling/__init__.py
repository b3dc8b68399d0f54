"""What one instance runs next: sequences, blocks, prefix cache, scheduler. Pure; the engine and the simulator share it."""
