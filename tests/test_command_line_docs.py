"""docs/command-line.md names every exit code and every error, as the code has them."""

from __future__ import annotations

import re
from pathlib import Path

from kvtier import errors

PAGE = (Path(__file__).parents[1] / "docs" / "command-line.md").read_text(encoding="utf-8")


def test_exit_codes() -> None:
    listed = dict(re.findall(r"^\| (\d+) \| (.*?) \|$", PAGE, re.MULTILINE))
    assert listed.pop("0") == "done"
    assert listed == dict(re.findall(r"^(\d+) +(\w.*)$", errors.__doc__ or "", re.MULTILINE))


def test_native_errors() -> None:
    listed = {name: int(code) for name, code in re.findall(r"^\| `(\w+)` \| (-\d+) \|", PAGE, re.MULTILINE)}
    assert listed == {cls.__name__: code for code, cls in errors.NATIVE_ERRORS.items()}


def test_the_python_example_runs(smollm2_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    code = code.replace('"model.gguf", n_ctx=32768', f"{str(smollm2_path)!r}, n_ctx=512, verbose=False")
    exec(compile(code.replace("max_tokens=64", "max_tokens=4"), "docs", "exec"), {})
