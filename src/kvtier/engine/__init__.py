"""llama.cpp with our library in it: `Llama`, its ways of making text, and what it does recorded as a trace."""
