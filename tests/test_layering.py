"""The layering rule: the hub imports no room, a room imports the hub and itself, packaging lists every package."""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("envs", "agents", "training", "assets")
FLOORS = (
    "errors cache processes messages snapshot check task_list mixture tree tool_text tool_json tool_pythonic "
    "tool_fence tool_react tool_formats chat budget allocation text_features predictor targets advantages "
    "batching executor env_calls play collect record evaluate viewer cli"
).split()


def sources(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*.py")):
        if not any(part.is_symlink() for part in [path, *path.parents] if part != folder):
            yield path


def imports(path: Path, everywhere: bool = True) -> Iterator[str]:
    """Yield the trace_gym modules that a file imports; only those at module level unless ``everywhere``."""
    tree = ast.parse(path.read_text())
    nodes = ast.walk(tree) if everywhere else tree.body
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("trace_gym"))
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import; absolute imports only"
            if (node.module or "").startswith("trace_gym"):
                yield str(node.module)


def room_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in ROOMS else None


def test_the_hub_imports_no_room_while_it_loads():
    """Only cli.py names rooms, inside its functions."""
    for path in sources(ROOT / "trace_gym"):
        inside_functions_too = path.name != "cli.py"
        rooms = [m for m in imports(path, inside_functions_too) if room_of(m)]
        assert not rooms, f"{path.name} imports {rooms}"


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_the_hub_and_itself_only(room):
    """What two rooms share is a contract in the hub."""
    for path in sources(ROOT / room):
        foreign = [m for m in imports(path) if room_of(m) not in (None, room)]
        assert not foreign, f"{path} imports {foreign}"


def test_inside_the_hub_imports_go_downward():
    """A hub file imports files below it only; new files must be given a floor."""
    for path in sources(ROOT / "trace_gym"):
        if path.stem in ("__init__", "__main__"):
            continue
        assert path.stem in FLOORS, f"give {path.name} a floor"
        for module in imports(path):
            target = module.split(".")[1] if "." in module else None
            if target is None or target in ROOMS:
                continue
            assert FLOORS.index(target) < FLOORS.index(path.stem), f"{path.stem} imports {target} from above"


def test_every_package_is_listed_for_the_wheel():
    """A forgotten sub-package would import in editable mode and be absent from the wheel."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = {"trace_gym"}
    for room in ROOMS:
        for init in sources(ROOT / room):
            if init.name == "__init__.py":
                found.add(".".join(("trace_gym", *init.parent.relative_to(ROOT).parts)))
    assert set(config["packages"]) == found
    for room in ROOMS:
        assert (ROOT / "trace_gym" / room).resolve() == ROOT / room


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout


def test_importing_trace_gym_needs_numpy_and_gymnasium_only():
    """No model library, no room and nothing optional is loaded."""
    code = (
        "import sys, gymnasium; before = set(sys.modules); import trace_gym; "
        "print(*sorted({m.split('.')[0] for m in set(sys.modules) - before}))"
    )
    loaded = set(run(code).split())
    assert loaded <= {"trace_gym", *sys.stdlib_module_names, "gymnasium", "numpy"}, loaded
    rooms = "import sys, trace_gym; print([m for m in sys.modules if m.startswith('trace_gym.envs')])"
    assert run(rooms).strip() == "[]"


@pytest.mark.parametrize("prefix", ["trace_gym:", "trace_gym.envs:"])
def test_both_prefix_forms_register_the_ids(prefix):
    """gymnasium.make imports the module before the colon and finds the id."""
    code = f"import gymnasium; print(gymnasium.make('{prefix}trace_gym/MathCode-v0').spec.id)"
    assert run(code).strip().endswith("trace_gym/MathCode-v0")
