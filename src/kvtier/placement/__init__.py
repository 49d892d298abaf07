"""A policy beside generation: what it is shown, the thread it runs in, its plans checked and applied."""
