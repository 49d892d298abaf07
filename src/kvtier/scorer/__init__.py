"""A small network that predicts a page's future attention mass from what the engine measures anyway. docs/scorer.md."""
