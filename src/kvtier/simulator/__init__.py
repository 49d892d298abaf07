"""Runs policies over recorded traces: the same objects that run beside generation, without a model."""
