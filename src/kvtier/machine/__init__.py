"""What this machine is: processor, memory, instruction sets."""
