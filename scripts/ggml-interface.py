#!/usr/bin/env python3
"""Compares the binary interface of ggml in llama-cpp-python source packages with that of the pinned tree.

For every package: the API version, limits, layout of the structs and numbers of the enums that the plug-in relies on
come from a program compiled against its headers; the interface structs are compared slot by slot as text, without
comments. Prints the differences. Exit status: 0 none, 1 some, 2 bad use.

    python3 scripts/ggml-interface.py llama_cpp_python-0.3.35.tar.gz [...]
"""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEADERS = ("ggml/include/", "ggml/src/ggml-backend-impl.h")
FIELDS = {
    "ggml_tensor": "type buffer ne nb op op_params flags src view_src view_offs data name extra",
    "ggml_backend_dev_props": "name description memory_free memory_total type device_id caps",
}
SIZES = (
    "ggml_tensor ggml_init_params ggml_type_traits ggml_backend_buffer_type_i ggml_backend_buffer_type "
    "ggml_backend_buffer_i "
    "ggml_backend_buffer ggml_backend_i ggml_backend ggml_backend_device_i ggml_backend_device ggml_backend_reg_i "
    "ggml_backend_reg ggml_backend_dev_props ggml_backend_dev_caps"
)
LIMITS = "GGML_BACKEND_API_VERSION GGML_MAX_DIMS GGML_MAX_SRC GGML_MAX_OP_PARAMS GGML_MAX_NAME"
ENUMS = (
    "ggml_op",
    "ggml_type",
    "ggml_status",
    "ggml_backend_dev_type",
    "ggml_backend_buffer_usage",
    "ggml_object_type",
)


def strip_comments(text: str) -> str:
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.S)


def interfaces(tree: Path) -> dict[str, str]:
    """Every slot of every interface struct, as 'struct.slot' -> its declaration."""
    text = strip_comments((tree / "ggml/src/ggml-backend-impl.h").read_text())
    slots = {}
    for struct, body in re.findall(r"struct\s+(\w+)\s*\{(.*?)\};", text, flags=re.S):
        for index, declaration in enumerate(d for d in body.split(";") if d.strip()):
            slots[f"{struct} slot {index}"] = re.sub(r"\s+", " ", declaration).strip()
    return slots


def enumerators(tree: Path) -> list[str]:
    text = "".join(strip_comments(p.read_text()) for p in sorted((tree / "ggml/include").glob("ggml*.h")))
    names = []
    for enum in ENUMS:
        match = re.search(rf"enum\s+{enum}\s*\{{(.*?)\}}", text, flags=re.S)
        if match:
            names += re.findall(r"\b(GGML_\w+)\b(?=\s*(?:=[^,}]*)?(?:,|\s*$))", match.group(1), flags=re.M)
    return names


def layout(tree: Path, work: Path) -> dict[str, str]:
    """Sizes, offsets and numbers, as a program compiled against the tree's headers prints them."""
    lines = [f'printf("{n}=%lld\\n", (long long) {n});' for n in LIMITS.split() + enumerators(tree)]
    lines += [f'printf("sizeof {n}=%zu\\n", sizeof({n}));' for n in SIZES.split()]
    for struct, fields in FIELDS.items():
        lines += [f'printf("{struct}.{f}=%zu\\n", offsetof({struct}, {f}));' for f in fields.split()]
    source = work / "facts.cpp"
    head = '#include "ggml-backend-impl.h"\n#include <cstddef>\n#include <cstdio>\nint main() {\n'
    source.write_text(head + "\n".join(lines) + "\n}\n")
    include = [f"-I{tree}/ggml/include", f"-I{tree}/ggml/src"]
    subprocess.run(["c++", "-std=c++17", "-w", *include, str(source), "-o", str(work / "facts")], check=True)
    output = subprocess.run([str(work / "facts")], check=True, capture_output=True, text=True).stdout
    return dict(line.rsplit("=", 1) for line in output.splitlines())


def facts(tree: Path) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as work:
        return {**layout(tree, Path(work)), **interfaces(tree)}


def unpack_headers(sdist: Path, into: Path) -> Path:
    """Unpacks the ggml headers of a source package; returns the tree that holds ggml/."""
    with tarfile.open(sdist) as archive:
        for member in archive:
            path = member.name.partition("/vendor/llama.cpp/")[2]
            if member.isfile() and path.startswith(HEADERS):
                target = into / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(archive.extractfile(member).read())  # type: ignore[union-attr]
    return into


def main(arguments: list[str]) -> int:
    pinned = ROOT / "third_party/llama.cpp"
    if not arguments or not pinned.exists():
        print(__doc__ if not arguments else f"missing {pinned}: run 'python3 scripts/fetch-llama.py'", file=sys.stderr)
        return 2
    reference = facts(pinned)
    differs = False
    for name in arguments:
        with tempfile.TemporaryDirectory() as work:
            other = facts(unpack_headers(Path(name), Path(work)))
        print(f"{Path(name).name}:")
        changed = [key for key in sorted({**reference, **other}) if reference.get(key) != other.get(key)]
        for key in changed:
            print(f"  {key}: {other.get(key, 'absent')}  (pin: {reference.get(key, 'absent')})")
        print(f"  {len(changed)} difference(s)")
        differs = differs or bool(changed)
    return 1 if differs else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
