"""Data: sources of text, rows of token ids, batches in a reproducible order."""
