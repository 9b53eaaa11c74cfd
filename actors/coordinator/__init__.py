"""Host-only decisions over plain data: scheduler, blocks, acceptance, commit."""
