"""Data: anything becomes an array of token ids."""
