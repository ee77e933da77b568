"""Training: one loop, one objective per file."""
