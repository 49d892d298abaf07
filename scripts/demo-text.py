#!/usr/bin/env python3
"""Writes a long real text for the demo: chapters of Python's own language reference, which every installation has.

    python3 scripts/demo-text.py FILE
"""

from __future__ import annotations

import sys
from pathlib import Path
from pydoc_data.topics import topics

# in reading order; about 7,000 tokens in the end
CHAPTERS = ("objects", "exceptions", "context-managers", "execmodel", "booleans", "assignment", "function", "class", "try", "with")
N_CHARACTERS = 31_000
CLOSING = "\n\nIn short, the most important thing to remember from all of the above is that"


def text() -> str:
    body = "\n\n".join(topics[name].strip() for name in CHAPTERS if name in topics)
    if len(body) < N_CHARACTERS:  # another Python release names its chapters otherwise
        body += "\n\n".join(topics[name].strip() for name in sorted(topics) if name not in CHAPTERS)
    body = body[:N_CHARACTERS]
    return body[: body.rindex(". ") + 1] + CLOSING


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    Path(sys.argv[1]).write_text(text(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
