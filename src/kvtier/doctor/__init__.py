"""What `kvtier doctor` finds: the machine, and what loads on it, tried in a process of its own."""
