"""The online memory of lossy fidelity: memory is bounded whatever the length, and what leaves is kept in ever less."""
