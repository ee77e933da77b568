"""Metrics, one per file."""
