"""What one instance runs next: sequences, blocks, prefix cache, scheduler. Pure; engine and simulator share it."""
