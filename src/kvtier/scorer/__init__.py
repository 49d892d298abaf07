"""Trains, tunes and judges the small network of `policies/scorer.py`, on recorded traces. docs/scorer.md."""
