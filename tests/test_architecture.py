"""The house rules of the code base, as tests: who may import whom, what travels with a checkpoint, sizes and style."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = {
    "tnt_hf": ROOT / "tnt_hf",
    "tnt_hf.conversion": ROOT / "conversion",
    "tnt_hf.recipes": ROOT / "recipes",
    "tnt_hf.model_cards": ROOT / "model_cards",
}

# Files that travel with every checkpoint -> the siblings each may import.
ARROWS = {
    "configuration_tnt": set(),
    "costs_tnt": {"configuration_tnt"},
    "network_tnt": {"compiler_tnt"},
    "denormals_tnt": set(),
    "precision_tnt": set(),
    "compiler_tnt": {"precision_tnt"},
    "derivative_tnt": set(),
    "coefficients_tnt": {"derivative_tnt", "denormals_tnt", "precision_tnt"},
    "grid_tnt": {"derivative_tnt"},
    "plan_tnt": {"network_tnt"},
    "scan_tnt": {"features_tnt", "network_tnt", "coefficients_tnt", "plan_tnt"},
    "rebuild_tnt": {"features_tnt", "network_tnt", "coefficients_tnt", "plan_tnt", "scan_tnt"},
    "block_tnt": {"features_tnt", "network_tnt", "coefficients_tnt", "plan_tnt", "scan_tnt", "rebuild_tnt"},
    "reverse_tnt": {
        "derivative_tnt",
        "denormals_tnt",
        "network_tnt",
        "coefficients_tnt",
        "precision_tnt",
        "plan_tnt",
        "scan_tnt",
        "rebuild_tnt",
        "block_tnt",
    },
    "inputs_tnt": {"features_tnt"},
    "step_tnt": {"compiler_tnt", "network_tnt"},
    "operators_tnt": {"compiler_tnt", "step_tnt"},
    "kernels_parts_tnt": {"network_tnt"},
    "kernels_choice_tnt": {"kernels_parts_tnt"},
    "kernels_local_tnt": {"kernels_parts_tnt"},
    "kernels_local_reverse_tnt": {"kernels_local_tnt", "kernels_parts_tnt"},
    "kernels_tnt": {
        "derivative_tnt",
        "coefficients_tnt",
        "plan_tnt",
        "kernels_parts_tnt",
        "kernels_local_tnt",
        "kernels_local_reverse_tnt",
        "kernels_global_tnt",
    },
    "projection_tnt": {
        "derivative_tnt",
        "grid_tnt",
        "inputs_tnt",
        "kernels_choice_tnt",
        "kernels_parts_tnt",
        "kernels_projection_tnt",
        "network_tnt",
        "operators_tnt",
        "precision_tnt",
    },
    "kernels_projection_tnt": {"derivative_tnt", "kernels_parts_tnt"},
    "kernels_chunk_tnt": {"kernels_parts_tnt"},
    "native_products_tnt": set(),
    "native_scalars_tnt": set(),
    "native_chunk_tnt": set(),
    "native_forward_tnt": set(),
    "native_reverse_tnt": set(),
    "native_programs_tnt": set(),
    "native_token_tnt": set(),
    "native_build_tnt": {
        "native_products_tnt",
        "native_scalars_tnt",
        "native_chunk_tnt",
        "native_forward_tnt",
        "native_reverse_tnt",
        "native_programs_tnt",
        "native_token_tnt",
    },
    "native_step_tnt": {
        "convolution_tnt",
        "derivative_tnt",
        "gate_tnt",
        "native_build_tnt",
        "precision_tnt",
        "state_tnt",
        "step_settings_tnt",
        "unit_tnt",
    },
    "native_tnt": {"derivative_tnt", "native_build_tnt", "plan_tnt"},
    "kernels_state_tnt": {"kernels_parts_tnt"},
    "kernels_global_tnt": {"derivative_tnt", "kernels_parts_tnt", "kernels_chunk_tnt", "kernels_state_tnt"},
    "kernels_decode_tnt": {"kernels_parts_tnt"},
    "memory_tnt": {
        "step_tnt",
        "operators_tnt",
        "inputs_tnt",
        "features_tnt",
        "network_tnt",
        "coefficients_tnt",
        "denormals_tnt",
        "derivative_tnt",
        "grid_tnt",
        "precision_tnt",
        "plan_tnt",
        "scan_tnt",
        "reverse_tnt",
        "projection_tnt",
        "kernels_choice_tnt",
        "kernels_parts_tnt",
        "kernels_tnt",
        "native_build_tnt",
        "native_tnt",
    },
    "state_tnt": {"configuration_tnt", "step_tnt"},
    "cache_layers_tnt": {"compiler_tnt"},
    "session_tnt": set(),
    "cache_tnt": {"cache_layers_tnt", "configuration_tnt", "costs_tnt", "session_tnt", "state_tnt"},
    "convolution_tnt": {"derivative_tnt", "grid_tnt"},
    "features_tnt": {"derivative_tnt"},
    "gate_tnt": {"configuration_tnt", "compiler_tnt", "derivative_tnt", "precision_tnt"},
    "unit_tnt": {
        "compiler_tnt",
        "configuration_tnt",
        "gate_tnt",
        "kernels_choice_tnt",
        "kernels_decode_tnt",
        "memory_tnt",
        "native_build_tnt",
        "network_tnt",
        "precision_tnt",
        "step_tnt",
    },
    "branch_tnt": {
        "step_settings_tnt",
        "native_step_tnt",
        "compiler_tnt",
        "cache_name_tnt",
        "features_tnt",
        "gate_tnt",
        "configuration_tnt",
        "kernels_choice_tnt",
        "network_tnt",
        "precision_tnt",
        "projection_tnt",
        "step_tnt",
        "state_tnt",
        "convolution_tnt",
        "kernels_parts_tnt",
        "tokens_tnt",
        "unit_tnt",
    },
    "tokens_tnt": {
        "convolution_tnt",
        "features_tnt",
        "compiler_tnt",
        "kernels_features_tnt",
        "precision_tnt",
        "projection_tnt",
    },
    "kernels_features_tnt": {"derivative_tnt", "kernels_parts_tnt"},
    "window_tnt": {"precision_tnt"},
    "masks_tnt": {"cache_name_tnt", "cache_tnt", "compiler_tnt", "configuration_tnt", "grid_tnt", "window_tnt"},
    "frozen_tnt": {"configuration_tnt"},
    "step_settings_tnt": {"configuration_tnt", "inputs_tnt"},
    "modeling_tnt": {
        "step_settings_tnt",
        "frozen_tnt",
        "window_tnt",
        "masks_tnt",
        "precision_tnt",
        "gate_tnt",
        "configuration_tnt",
        "memory_tnt",
        "cache_tnt",
        "continuation_tnt",
        "generation_tnt",
        "state_tnt",
        "branch_tnt",
        "unit_tnt",
        "compiler_tnt",
        "cache_name_tnt",
        "convolution_tnt",
    },
    "cache_name_tnt": set(),
    "generation_tnt": {"cache_name_tnt", "cache_tnt", "configuration_tnt", "continuation_tnt", "masks_tnt"},
    "continuation_tnt": {"cache_name_tnt", "cache_tnt", "compiler_tnt", "configuration_tnt", "state_tnt"},
}
TORCH_ONLY = {name for name, siblings in ARROWS.items() if "configuration_tnt" not in siblings} - {
    "configuration_tnt",
    "cache_layers_tnt",
    "cache_name_tnt",
    "session_tnt",
}
HUB_PACKAGES = {"torch", "transformers", "huggingface_hub", "safetensors"}
NO_TENSORS = {
    "cache_name_tnt",
    "derivative_tnt",
    "configuration_tnt",
    "costs_tnt",
    "denormals_tnt",
    "frozen_tnt",
    "operators_tnt",
    "precision_tnt",
}  # or none with axes
MAX_LINES = {"memory_tnt.py": 600, "modeling_tnt.py": 900}
TRAVELLING = sorted((ROOT / "tnt_hf").glob("*_tnt.py"))
CODE = sorted(
    path for folder in ("tnt_hf", "conversion", "recipes", "tests") for path in (ROOT / folder).rglob("*.py")
)
WRITTEN_BY_RUNS = {"bench_out", "build", "demo_out", "dist"}


def named(paths):
    return pytest.mark.parametrize("path", paths, ids=[path.relative_to(ROOT).as_posix() for path in paths])


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports(path: Path) -> list[tuple[ast.Import | ast.ImportFrom, bool]]:
    """Every import statement of a file with whether a `try … except ImportError` guards it."""
    guarded = {
        inner
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Try) and any("Import" in ast.unparse(h.type) for h in node.handlers if h.type)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    found = [node for node in ast.walk(tree(path)) if isinstance(node, ast.Import | ast.ImportFrom)]
    return [(node, node in guarded) for node in found]


def absolute_modules(path: Path, guarded_too: bool = True) -> set[str]:
    """Full dotted names of a file's absolute imports."""
    found = set()
    for node, guarded in imports(path):
        if guarded and not guarded_too:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif node.level == 0:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


# --- the files that travel ------------------------------------------------------------------------------------------


def test_one_file_knows_when_a_program_is_exported():
    """torch 2.11 has to be asked in another way than later ones, see `compiler_tnt`."""
    asking = [path.name for path in TRAVELLING if "compiler.is_exporting" in path.read_text()]
    assert asking == ["compiler_tnt.py"]


@named(TRAVELLING)
def test_travelling_files_import_only_what_the_hub_path_can_resolve(path):
    allowed = ARROWS[path.stem]
    siblings = set()
    for node, _ in imports(path):
        if isinstance(node, ast.ImportFrom) and node.level:
            assert node.level == 1 and node.module and "." not in node.module, (
                f"line {node.lineno}: {ast.unparse(node)}"
            )
            siblings.add(node.module)
    assert siblings <= allowed, f"{path.stem} may import {sorted(allowed)}, not {sorted(siblings - allowed)}"

    top_level = {name.partition(".")[0] for name in absolute_modules(path)}
    assert "tnt_hf" not in top_level, "an absolute import fails where the package is not installed"
    unguarded = {name.partition(".")[0] for name in absolute_modules(path, guarded_too=False)}
    third_party = unguarded - set(sys.stdlib_module_names)
    assert third_party <= ({"torch"} if path.stem in TORCH_ONLY else HUB_PACKAGES), third_party


@named(TRAVELLING)
def test_no_docstring_looks_like_a_relative_import(path):
    """Transformers finds the files to copy with this pattern, in the text: a docstring would send it after a ghost."""
    pattern = r"^\s*(?:from\s+\.(\S+)\s+import|import\s+\.(\S+)\s*$)"
    matched = {a or b for a, b in re.findall(pattern, path.read_text(), flags=re.MULTILINE)}
    real = {node.module for node, _ in imports(path) if isinstance(node, ast.ImportFrom) and node.level}
    assert matched == real


@named([path for path in TRAVELLING if path.stem not in NO_TENSORS])
def test_tensor_code_explains_its_axes(path):
    assert "Axis legend" in (ast.get_docstring(tree(path)) or "")


# --- everybody ------------------------------------------------------------------------------------------------------


def test_arrows_between_packages():
    for path in CODE:
        names = {name.partition(".")[0] for name in absolute_modules(path)}
        assert not names & {"conversion", "recipes"}, f"{path}: import tnt_hf.conversion and tnt_hf.recipes"
        assert path.stem != "utils", f"{path}: name it after what it does"
    for path in PACKAGES["tnt_hf.conversion"].rglob("*.py"):
        assert not any(name.startswith(("tnt_hf.recipes", "tnt_hf.cli")) for name in absolute_modules(path)), path
    for path in [*PACKAGES["tnt_hf.recipes"].rglob("*.py"), ROOT / "tnt_hf" / "__init__.py"]:
        assert not any(name.startswith("tnt_hf.cli") for name in absolute_modules(path)), path


@pytest.mark.parametrize("package", ["tnt_hf", "tnt_hf.conversion"])
def test_names_that_are_imported_when_used_are_listed_for_people_and_tools(package):
    """`dir()` shows them though nothing is loaded, and type checkers, which run nothing, find imports of the same."""
    code = f"import sys; sys.argv = ['tnt']; import {package}; print(*dir({package})); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT.anchor, capture_output=True, text=True)
    listed, loaded = done.stdout.splitlines()
    module = tree(PACKAGES[package] / "__init__.py")
    (checked,) = [x for x in module.body if isinstance(x, ast.If) and ast.unparse(x.test) == "TYPE_CHECKING"]
    imported = sorted(alias.name for node in checked.body for alias in node.names)
    values = {ast.unparse(x.targets[0]): x.value for x in module.body if isinstance(x, ast.Assign)}
    assert imported == sorted(ast.literal_eval(values["__all__"]))
    assert set(imported) <= set(listed.split()) and loaded == "False"


def test_the_command_line_loads_nothing_at_import():
    at_import = {
        alias.name if isinstance(node, ast.Import) else node.module
        for node in tree(ROOT / "tnt_hf" / "cli.py").body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert {str(name).partition(".")[0] for name in at_import} <= set(sys.stdlib_module_names)


@named(CODE)
def test_file_size(path):
    lines, limit = len(path.read_text().splitlines()), 600 if ROOT / "tests" in path.parents else 400
    assert lines <= MAX_LINES.get(path.name, limit), f"{lines} lines"


@named([path for path in CODE if path.relative_to(ROOT).parts[0] != "tests"])
def test_docstrings(path):
    """Every file says what it is; every public class and function does, too, but for scripts that measure."""
    assert ast.get_docstring(tree(path)), "the module has no docstring"
    if "benchmarks" not in path.parts:
        public = [x for x in tree(path).body if isinstance(x, ast.ClassDef | ast.FunctionDef) and x.name[0] != "_"]
        assert not [node.name for node in public if not ast.get_docstring(node)]


def test_nothing_names_one_machine_or_one_registry():
    machine = re.compile(r"(?<![\w.])/(?:work|root|home/\w+|Users/\w+|opt/\w+|tmp/\w+)/")
    registry = re.compile(
        r"pythonhosted\.org|pypi\.org/simple|download\.pytorch\.org|(?:extra-)?index-url\s*=|find-links"
    )
    hidden = {x.name for x in ROOT.glob(".*")} - {".ci", ".gitignore"}
    for top in (x for x in ROOT.iterdir() if x.name not in hidden | WRITTEN_BY_RUNS and "egg-info" not in x.name):
        for path in [top, *top.rglob("*")]:
            if not path.is_file() or path == Path(__file__) or "__pycache__" in path.parts:
                continue
            if path.suffix in {".py", ".md", ".toml", ".txt", ".yaml", ".yml", ".json", ""}:
                for number, line in enumerate(path.read_text().splitlines(), 1):
                    found = machine.search(line) or registry.search(line)
                    assert not found, f"{path.relative_to(ROOT)}:{number}: {found.group()}"


@pytest.mark.parametrize("command", [["check", "--output-format=concise"], ["format", "--check", "--quiet"]])
def test_ruff(command):
    done = subprocess.run([sys.executable, "-m", "ruff", *command, "."], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


# --- packaging ------------------------------------------------------------------------------------------------------


def test_one_version():
    assert f'__version__ = "{PROJECT["project"]["version"]}"' in (ROOT / "tnt_hf" / "__init__.py").read_text()
    assert f"## [{PROJECT['project']['version']}]" in (ROOT / "CHANGELOG.md").read_text()


def test_every_package_folder_is_declared():
    declared = set(PROJECT["tool"]["setuptools"]["packages"])
    on_disk = {
        ".".join([name, *init.parent.relative_to(folder).parts])
        for name, folder in PACKAGES.items()
        for init in folder.rglob("__init__.py")
    }
    assert declared == on_disk


@pytest.mark.long
def test_the_installed_project_maps_its_folders():
    """`tnt_hf.conversion` and `tnt_hf.recipes` import from wherever the project was installed."""
    code = "import tnt_hf.conversion, tnt_hf.recipes; print(tnt_hf.conversion.__file__, tnt_hf.recipes.__file__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT.anchor, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel that pip makes of this clone."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (source / name).write_bytes((ROOT / name).read_bytes())
    for package in PACKAGES.values():
        for path in package.rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                copy = source / path.relative_to(ROOT)
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_bytes(path.read_bytes())
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        folder,
        source,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (made,) = folder.glob("*.whl")
    return made


@pytest.mark.long
def test_a_wheel_holds_all_packages(wheel):
    names = set(ZipFile(wheel).namelist())
    for name, folder in PACKAGES.items():
        for path in folder.rglob("*.py"):
            assert (Path(*name.split(".")) / path.relative_to(folder)).as_posix() in names, path
    assert "tnt_hf/py.typed" in names, "type checkers would take every name for Any"


INSTALLED = """
import tnt_hf
from transformers import LlamaConfig, LlamaForCausalLM
from tnt_hf.conversion import convert_checkpoint
from tnt_hf.recipes.model_card import TEMPLATE
from tnt_hf.recipes.recipe_file import find_recipe

sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained("llama")
convert_checkpoint("llama", "hybrid", window=4)
print(tnt_hf.__file__, TEMPLATE.is_file(), find_recipe("tnt_debug/stage1").is_file())
"""


@pytest.mark.long
def test_an_installed_wheel_finds_its_code_templates_and_recipes(wheel, tmp_path):
    """In a wheel the folders lie inside `tnt_hf`, in a clone beside it: paths must work in both."""
    ZipFile(wheel).extractall(tmp_path / "site")
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    command = [sys.executable, "-c", INSTALLED]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(tmp_path / "site" / "tnt_hf" / "__init__.py"), "True", "True"]
    travels = {path.name for path in (ROOT / "tnt_hf").glob("*_tnt.py")}
    assert travels and travels <= {path.name for path in (tmp_path / "hybrid").iterdir()}


def test_constraints_pin_every_declared_requirement():
    pins = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            requirement = Requirement(line)
            (pin,) = requirement.specifier
            assert pin.operator == "==" and "+" not in pin.version and not requirement.url, line
            pins[canonicalize_name(requirement.name)] = pin.version
    project = PROJECT["project"]
    groups = {"": project["dependencies"], **project["optional-dependencies"]}
    for group, requirements in groups.items():
        for requirement in map(Requirement, requirements):
            name = canonicalize_name(requirement.name)
            if name != "triton":  # constraints.txt says why
                assert requirement.specifier.contains(pins[name]), f"{group}: {requirement} against {pins[name]}"
