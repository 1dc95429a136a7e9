"""Rules nobody has to remember: who imports whom, what is public, what no module may be called."""

import ast
import sys
from pathlib import Path

import pytest

import layerskip
from layerskip.share import run_record

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("layerskip", "train", "infer")
LIBRARY_MAY_IMPORT = {
    "torch",
    "transformers",
    "huggingface_hub",
    "safetensors",
    "layerskip",
}  # transformers brings both
DEPENDENCIES = {
    *("torch", "transformers", "datasets", "accelerate", "deepspeed", "wandb", "rich", "yaml", "tokenizers"),
    *("safetensors", "huggingface_hub", "numpy", "pytest", "matplotlib", "fastapi"),
}


def modules(room: str) -> list[Path]:
    return sorted((ROOT / room).rglob("*.py"))


def imported(path: Path) -> list[tuple[str, int]]:
    """(top-level package, line) of every import in a file, wherever it stands."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(alias.name.split(".")[0], node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.append((node.module.split(".")[0], node.lineno))
    return found


@pytest.mark.parametrize("path", modules("layerskip"), ids=lambda p: p.name)
def test_the_library_imports_torch_and_transformers_only(path):
    allowed = LIBRARY_MAY_IMPORT | set(sys.stdlib_module_names)
    assert [f"{path.name}:{line} imports {name}" for name, line in imported(path) if name not in allowed] == []


@pytest.mark.parametrize(("room", "forbidden"), [("train", "infer"), ("infer", "train"), ("layerskip", "argparse")])
def test_programs_know_the_library_and_not_each_other(room, forbidden):
    wrong = [f"{p}:{line}" for p in modules(room) for name, line in imported(p) if name == forbidden]
    assert wrong == []


def test_one_module_of_the_library_knows_a_runs_files():
    """What training and benchmark leave behind is named in run_record.py; others take the names from there."""
    for path in modules("layerskip"):
        if path.name != "run_record.py":
            text = path.read_text(encoding="utf-8")
            assert [name for name in run_record.RECORDS if f'"{name}"' in text] == [], path


def test_only_one_room_knows_how_models_are_built():
    """Attribute paths and cache arguments are for anatomy.py and views.py; nobody else reaches into a model."""
    words = (".model.layers", "get_decoder", "lm_head", "past_key_values=", ".transformer.h")
    for room in ROOMS:
        for path in modules(room):
            if path.name not in ("anatomy.py", "views.py"):
                assert not [word for word in words if word in path.read_text(encoding="utf-8")], path


@pytest.mark.parametrize("room", ROOMS)
def test_no_module_is_named_like_a_dependency_or_the_standard_library(room):
    """Launched as a folder, a program's modules would hide them."""
    names = {path.stem for path in modules(room)}
    taken = DEPENDENCIES | set(sys.stdlib_module_names)
    assert names & taken - {"__init__", "__main__", *(("stages", "cache") if room == "layerskip" else ())} == set()


def test_the_public_names():
    assert set(layerskip.__all__) == {
        *("generate", "steps", "stream", "prepare", "Recipe", "RecipeCallback", "Setting", "Stages", "RollbackCache"),
        *("Statistics", "Step", "Piece", "SelfSpeculativeOutput", "UnsupportedModelError", "Grammar"),
    }
    assert set(layerskip.__all__) == set(layerskip._HOMES)
    for name in layerskip.__all__:
        assert getattr(layerskip, name).__doc__, name
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = layerskip.no_such_name


@pytest.mark.parametrize("room", ROOMS)
def test_every_module_says_what_it_is(room):
    silent = [p.name for p in modules(room) if not ast.get_docstring(ast.parse(p.read_text(encoding="utf-8")))]
    assert silent == []


@pytest.mark.parametrize("room", ["train", "scripts"])
def test_functions_are_short_enough_to_be_read_at_once(room):
    def own_lines(function: ast.FunctionDef) -> int:
        body = function.body[1:] if ast.get_docstring(function) else function.body
        return 1 + function.end_lineno - function.lineno - (body[0].lineno - function.body[0].lineno if body else 0)

    functions = [
        (path.name, node)
        for path in modules(room)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
    ]
    assert functions
    long = {f"{name}: {function.name}": own for name, function in functions if (own := own_lines(function)) > 40}
    assert long == {}
