#!/usr/bin/env python3
"""Writes a long real text for the demo: chapters of Python's own language reference, which every installation has.

A fifth into it stands a number that is none of its business, and the end asks for it.

    python3 scripts/demo-text.py FILE
"""

from __future__ import annotations

import sys
from pathlib import Path
from pydoc_data.topics import topics

# in reading order; about 7,000 tokens in the end
CHAPTERS = (
    "objects",
    "exceptions",
    "context-managers",
    "execmodel",
    "booleans",
    "assignment",
    "function",
    "class",
    "try",
    "with",
)
N_CHARACTERS = 31_000
NUMBER = "7318052"
SECRET = f"The secret number of this manual is {NUMBER}."
CLOSING = "\n\nThe secret number of this manual is"


def text() -> str:
    body = "\n\n".join(topics[name].strip() for name in CHAPTERS if name in topics)
    if len(body) < N_CHARACTERS:  # another Python release names its chapters otherwise
        body += "\n\n".join(topics[name].strip() for name in sorted(topics) if name not in CHAPTERS)
    body = body[: body.rindex(". ", 0, N_CHARACTERS) + 1]
    paragraphs = body.split("\n\n")
    paragraphs.insert(len(paragraphs) // 5, SECRET)
    return "\n\n".join(paragraphs) + CLOSING


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    Path(sys.argv[1]).write_text(text(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
