"""`kvtier bench`: decode and prefill speed as ratios against stock llama.cpp, same build, same run, interleaved."""
