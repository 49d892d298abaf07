"""`python -m kvtier`: the same as the program `kvtier`."""

from .cli import main

main(prog_name="kvtier")
