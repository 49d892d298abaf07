"""Stock llama.cpp and kvtier, measured side by side in one run.

Every configuration lives in its own child process (`child`, `worker`), so that a crash costs one row and no
configuration sees another's memory or threads. The parent takes them in turn, one at a time (A B A B), which lets
slow drifts of the machine fall on all of them alike; what is reported is a median of per-round ratios (`figures`).
"""
