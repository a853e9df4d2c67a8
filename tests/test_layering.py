"""Who may import whom; read from the source, so that nothing needs to be installed."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "sglang_trunc"
STDLIB = set(sys.stdlib_module_names)

# Part -> top-level modules it may import, besides the standard library and itself.
MAY_IMPORT = {
    "core": {"torch"},
    "kernels": {"torch", "triton"},
    "reference": {"torch", "safetensors", "tokenizers", "transformers", "sglang_trunc.core"},
    # tensor_names reads the headers of a Hub repository's checkpoint
    "models": {"torch", "transformers", "tokenizers", "huggingface_hub", "httpx", "sglang", "sglang_trunc.core"},
    "platform": {"torch", "numba", "numpy", "sglang", "llvmlite", "sglang_trunc.core", "sglang_trunc.models"},
    "engine": {
        "torch",
        "numpy",
        "prometheus_client",
        "sglang",
        *(f"sglang_trunc.{part}" for part in ("core", "kernels", "models", "platform")),
    },
    "serving": {"httpx", "torch"},
    "cli": {
        "httpx",
        "rich",
        "torch",
        "typer",
        "huggingface_hub",
        "sglang",
        *(f"sglang_trunc.{part}" for part in ("core", "models", "serving", "seams", "platform", "engine")),
    },
    "plugin.py": {"torch", "sglang", *(f"sglang_trunc.{part}" for part in ("seams", "models", "platform", "engine"))},
    "seams.py": set(),
    "__init__.py": set(),
}


def imports(file: Path) -> set[str]:
    """Top-level modules, or ``sglang_trunc.<part>``; inside functions and type-checking blocks as well."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            # ``from sglang_trunc import seams`` names a part as well.
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= inner if node.module == "sglang_trunc" else {node.module}
    return {".".join(name.split(".")[: 2 if name.startswith("sglang_trunc") else 1]) for name in found}


def part_of(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0]


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_imports_stay_inside_their_layer(file):
    part = part_of(file)
    allowed = MAY_IMPORT[part] | STDLIB | {f"sglang_trunc.{part}"}
    assert imports(file) <= allowed


def test_only_the_plugin_and_the_command_line_import_the_engine():
    importers = {part_of(file) for file in FILES if "sglang_trunc.engine" in imports(file)}
    assert importers <= {"engine", "plugin.py", "cli"}


def test_transformers_and_tokenizers_come_late_in_the_reference():
    """Only writing a tokenizer needs them: the reference models run with torch and safetensors alone."""
    for file in (PACKAGE / "reference").glob("*.py"):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                module = node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
                assert (module or "").split(".")[0] not in ("transformers", "tokenizers"), file.name


def test_every_part_has_its_rule():
    assert {part_of(file) for file in FILES} == set(MAY_IMPORT)
