"""Our compiled library: its functions, how llama.cpp comes to use it, and the KV cache's figures."""
