"""Which stock llama.cpp is compared with: how it was built, and which figures against it are no result."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ..machine.buildargs import compiler_takes, install_command, named_args
from ..machine.hardware import amx_state, cpu_flags, cpu_name
from ..machine.stockbuild import StockBuild
from ..model.gguf import read_model
from ..model.shape import shape_of
from .child import Child
from .config import Configuration

MARK: Final = "!"  # at figures of a slow build of stock, and at ratios against it


@dataclass(frozen=True, slots=True)
class Stock:
    """The installed llama.cpp as a baseline for one model. `head_sizes` are the channels of V in the model's layers."""

    build: StockBuild
    head_sizes: tuple[int, ...]

    def is_slow(self, config: Configuration) -> bool:
        """Whether another build of the same llama.cpp would run this configuration faster. kvtier's never."""
        if config.engine != "stock":
            return False
        # Without flash attention, attention is made of matrix products, which have no slow code.
        type_v = config.type_v if config.flash_attn else ""
        return self.build.is_slow_for(type_v, self.head_sizes)

    def slow_names(self, configs: Iterable[Configuration]) -> frozenset[str]:
        """The names of those that another build would run faster."""
        return frozenset(config.name for config in configs if self.is_slow(config))

    def warning(self) -> str:
        """What is wrong with the build and how to mend it; empty for a good one."""
        problems = self.build.problems()
        if not problems:
            return ""
        flags = self.build.flags
        command = install_command(named_args(flags, amx_state(flags), compiler_takes), self.build.version)
        return f"stock llama.cpp is a slow build: {'; '.join(problems)}. Compile it anew:\n{command}"

    def footnote(self) -> str:
        """What the mark means."""
        return (
            f"{MARK} of or against a slow build of stock llama.cpp, no measure of what stock can do: "
            f"{'; '.join(self.build.problems())}; `kvtier doctor` has the command that mends it"
        )

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**self.build.to_dict(), "head_sizes": list(self.head_sizes)}


def look(model: Path) -> Stock:
    """Ask a measuring process how the installed llama.cpp was built. Raises WorkerError, or GgufError for no model."""
    with Child() as child:
        answer = child.ask("build")
    build = StockBuild.from_answer(answer, cpu_name(), cpu_flags())
    return Stock(build, tuple(sorted({layer.d_v for layer in shape_of(read_model(model)[0]).attention})))
