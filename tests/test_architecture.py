"""The floors of the house: which part may import which, and which library is known to one part only."""

import ast
import pathlib
import sys
from collections.abc import Iterator

import pytest

import transformer_jax.config

PACKAGE = pathlib.Path(transformer_jax.config.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

# Files beside the folders: the ground floor, which knows the standard library only.
CONFIG = {"errors", "config", "config_checks", "config_fields", "config_loading", "presets", "heap"}

# Part -> the parts that it may import, besides itself.
BASE = {"config", "ops"}
MIDDLE = BASE | {"model", "search", "data", "parallel", "checkpointing"}
ALLOWED = {
    "config": set(),
    "ops": {"config"},
    "model": BASE,
    "search": BASE,
    "data": {"config"},
    "parallel": BASE,
    "checkpointing": {"config"},
    "translation": MIDDLE,
    "evaluation": MIDDLE | {"translation"},
    "training": MIDDLE | {"translation", "evaluation"},
    "parsing": MIDDLE | {"translation"},
    "analysis": MIDDLE | {"translation"},
    "interchange": MIDDLE | {"translation", "training"},
    "compile_check": MIDDLE | {"translation", "training"},
}
ALLOWED["ablation"] = MIDDLE | {"evaluation", "training"}
ALLOWED["cli"] = set(ALLOWED)


def imports(file: pathlib.Path) -> Iterator[str]:
    """Every module that a file imports, at its top or inside a function; `from a import b` gives `a.b`."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import; write the whole name"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def part_of(module: str) -> str:
    """The folder of a module, `config` for the files of the ground floor."""
    first = module.split(".")[1]
    return "config" if first in CONFIG else first


def name_of(file: pathlib.Path) -> str:
    return file.relative_to(PACKAGE).as_posix()


def module_of(file: pathlib.Path) -> str:
    return ".".join(["transformer_jax", *file.relative_to(PACKAGE).with_suffix("").parts])


def importers(library: str) -> set[str]:
    """The files that import a library or a module in it."""
    return {
        name_of(file)
        for file in FILES
        if any(name == library or name.startswith(f"{library}.") for name in imports(file))
    }


@pytest.mark.parametrize("file", [file for file in FILES if name_of(file) != "__init__.py"], ids=name_of)
def test_each_file_imports_only_the_parts_above_its_own(file):
    part = part_of(module_of(file))
    assert part in ALLOWED, f"{name_of(file)}: a folder that the architecture does not know; give it a floor here"
    for name in imports(file):
        if name.startswith("transformer_jax."):
            assert part_of(name) in ALLOWED[part] | {part}, f"{name_of(file)} imports {name}"


def test_only_the_model_knows_flax():
    assert {name.split("/")[0] for name in importers("flax")} == {"model"}
    assert importers("flax.training") == set()


def test_only_one_file_knows_orbax():
    assert importers("orbax") == {"checkpointing/array_files.py"}


def test_only_the_command_line_knows_tyro():
    assert {name.split("/")[0] for name in importers("tyro")} == {"cli"}


@pytest.mark.parametrize("library", ["jax", "jaxlib", "flax", "optax"])
def test_data_and_evaluation_scores_run_without_jax(library):
    assert not any(name.startswith("data/") or name == "evaluation/bleu.py" for name in importers(library))


@pytest.mark.parametrize(
    ("part", "libraries"),
    [
        ("config", set()),
        ("ops", {"jax", "jaxtyping", "numpy"}),
        ("search", {"jax", "jaxtyping", "numpy"}),
        ("model", {"flax", "jax", "jaxtyping", "numpy"}),
    ],
)
def test_lower_floors_know_few_libraries(part, libraries):
    found = {name.split(".")[0] for file in FILES if part_of(module_of(file)) == part for name in imports(file)}
    assert found - set(sys.stdlib_module_names) - {"transformer_jax"} <= libraries


def test_no_library_that_is_retired_or_heavy():
    retired = ["flax.training", "clu", "tensorflow", "jax.experimental.pjit", "torch"]
    assert {library: found for library in retired if (found := importers(library))} == {}


def test_nothing_uses_pmap_or_pjit():
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            name = getattr(node, "attr", None) or getattr(node, "id", None)
            assert name not in ("pmap", "pjit"), f"{name_of(file)}: {name}; write jax.jit with shardings"
