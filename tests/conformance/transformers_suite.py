"""Finds the tests of the installed Transformers version and makes them importable as the package `transformers_tests`.

A wheel of Transformers has no tests, so they come from one of two places:

1. the environment variable `TNT_TRANSFORMERS_TESTS`: the `tests` folder of a checkout (everything is there);
2. the source distribution of the *installed* version, which pip downloads once into `.cache/` (ignored by git) and
   whose digest is checked. It carries the model, training and pipeline mixins, but neither
   `generation/test_utils.py` nor `exporters/`, nor the per-task pipeline tests.

What a source lacks is filled in so that the rest still imports: the generation and export mixins become empty classes
(the caller must say so: see `missing_modules`), the per-task pipeline tests those of `pipeline_stand_ins`.
Nothing of Transformers' tests is stored in this repository.
"""

import functools
import hashlib
import importlib
import importlib.machinery
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import types
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import transformers
from filelock import FileLock


ENVIRONMENT_VARIABLE = "TNT_TRANSFORMERS_TESTS"
PACKAGE = "transformers_tests"
CACHE = Path(__file__).resolve().parents[2] / ".cache" / "transformers_tests"
# A version that is not listed is accepted as pip delivers it; a listed one must match.
SDIST_SHA256 = {
    "5.23.0": "19d647a4d5d903a7c644ca5cde2d86efc3dde7d8c687ae7988806ff2205efa71",
    "5.24.0": "906cb8c3cb2123575e263962586a4d21a979ce97feeb95fe6aaf66fe6ae88bf3",
}
GENERATION_TESTS = "generation.test_utils"
EXPORT_TESTS = "exporters.test_export"
# Never taken from a checkout: the mixins need one dictionary of it, but importing it needs the checkout's tools.
CONFIGURATION_UTILS = "utils.test_configuration_utils"


class SuiteUnavailableError(RuntimeError):
    """No tests of Transformers can be had here: no checkout is named and pip could not deliver the sdist."""


@dataclass(frozen=True)
class Source:
    """Where the tests come from: `folder` holds `test_modeling_common.py`, `kind` is `checkout` or `sdist`."""

    folder: Path
    kind: str

    def has(self, module: str) -> bool:
        """Whether the dotted `module` (relative to the tests folder) is a file of this source."""
        return self.folder.joinpath(*module.split(".")).with_suffix(".py").is_file()


@functools.cache
def locate() -> Source:
    """Returns the source of the tests, downloading the sdist where no checkout is named.

    Raises:
        ValueError: `TNT_TRANSFORMERS_TESTS` names a folder without Transformers' tests.
        SuiteUnavailableError: no checkout is named and the sdist cannot be downloaded.
    """
    value = os.environ.get(ENVIRONMENT_VARIABLE)
    if value:
        for folder in (Path(value).expanduser(), Path(value).expanduser() / "tests"):
            if (folder / "test_modeling_common.py").is_file():
                return Source(folder.resolve(), "checkout")
        raise ValueError(f"{ENVIRONMENT_VARIABLE}={value!r} is not the tests folder of a Transformers checkout")
    return Source(_sdist_tests(transformers.__version__), "sdist")


def _sdist_tests(version: str) -> Path:
    """The unpacked `tests` folder of the sdist of `version`, from the cache or through pip."""
    folder = CACHE / version
    CACHE.mkdir(parents=True, exist_ok=True)
    # Test workers collect at the same time: the first one downloads, the others wait for it.
    with FileLock(CACHE / f"{version}.lock"):
        stamp = folder / "source.json"
        expected = SDIST_SHA256.get(version)
        if stamp.is_file() and expected in (None, json.loads(stamp.read_text())["sha256"]):
            return folder / "tests"
        shutil.rmtree(folder, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as download:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
            # The build requirement, setuptools, is a development dependency: no isolated build environment is needed.
            command += ["--no-build-isolation", "--dest", download, f"transformers=={version}"]
            result = subprocess.run(command, capture_output=True, text=True, timeout=600)
            archives = list(Path(download).glob("*.tar.gz"))
            if result.returncode != 0 or len(archives) != 1:
                tail = result.stderr.strip().splitlines()[-1:] or ["no message"]
                raise SuiteUnavailableError(
                    f"the sdist of transformers {version} could not be downloaded ({tail[0]}); name the tests folder "
                    f"of a checkout in {ENVIRONMENT_VARIABLE} instead"
                )
            digest = hashlib.sha256(archives[0].read_bytes()).hexdigest()
            if expected not in (None, digest):
                raise SuiteUnavailableError(f"transformers {version}: sdist sha256 {digest}, expected {expected}")
            with tarfile.open(archives[0]) as archive:
                root = archive.getnames()[0].split("/")[0]
                members = [m for m in archive.getmembers() if m.name.startswith(f"{root}/tests/")]
                # Python 3.11.0 to 3.11.3 has no filters; there links and what leads outside are left out by hand.
                members = [m for m in members if (m.isfile() or m.isdir()) and ".." not in Path(m.name).parts]
                safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
                archive.extractall(download, members=members, **safely)
            folder.mkdir()
            shutil.move(Path(download) / root / "tests", folder / "tests")
            # Last: only a complete folder has the stamp.
            stamp.write_text(json.dumps({"version": version, "sha256": digest}))
    return folder / "tests"


def missing_modules() -> list[str]:
    """The modules, out of those the mixins build on, that the source in use does not have."""
    return [name for name in (GENERATION_TESTS, EXPORT_TESTS) if not locate().has(name)]


# ------------------------------------------------------------------------------------------------------------ import


class _Finder:
    """Imports `transformers_tests.*` from the source, and what the source lacks from `_stand_in`."""

    def __init__(self, folder: Path):
        self.folder = folder

    def find_spec(self, fullname, path=None, target=None):
        if fullname != PACKAGE and not fullname.startswith(PACKAGE + "."):
            return None
        name = fullname[len(PACKAGE) + 1 :]
        base = self.folder.joinpath(*name.split(".")) if name else self.folder
        file = base.with_suffix(".py")
        if name and file.is_file() and name != CONFIGURATION_UTILS:
            return importlib.util.spec_from_file_location(fullname, file, loader=_Loader(fullname, str(file)))
        stand_in = _stand_in(name)
        if stand_in is None and (base.is_dir() or name in ("", "generation", "exporters", "utils", "pipelines")):
            return importlib.machinery.ModuleSpec(fullname, _Contents({}), is_package=True)
        if stand_in is not None:
            return importlib.machinery.ModuleSpec(fullname, _Contents(stand_in))
        return None


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads one upstream file under our package name; its absolute imports of `tests` would find our own tests."""

    def get_code(self, fullname):
        # No byte-code cache: it would belong to the file, not to this renaming.
        return self.source_to_code(self.get_data(self.path), self.path)

    def source_to_code(self, data, path, **options):
        text = re.sub(r"(?m)^(\s*(?:from|import) )tests\.", rf"\1{PACKAGE}.", data.decode())
        text = text.replace('"tests.pipelines.', f'"{PACKAGE}.pipelines.')
        return super().source_to_code(text, path)

    def exec_module(self, module):
        # Upstream imports the library from the checkout around the tests; here it is the installed one.
        with mock.patch("transformers.utils.direct_transformers_import", lambda *args, **kwargs: transformers):
            super().exec_module(module)


class _Contents:
    """A loader for a module whose names are given."""

    def __init__(self, names: dict):
        self.names = names

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        vars(module).update(self.names)


def _stand_in(name: str) -> dict | None:
    """The names of the module that stands in for the upstream module `name`, None where there is none."""
    if name == GENERATION_TESTS:
        return {"GenerationTesterMixin": type("GenerationTesterMixin", (), {})}
    if name == EXPORT_TESTS:
        return {key: type(key, (), {}) for key in ("ExportTesterMixin", "ExportGenerateTesterMixin")}
    if name == CONFIGURATION_UTILS:
        # Values unlike the defaults of PreTrainedConfig: they show whether a field survives a round trip.
        values = {"return_dict": False, "output_hidden_states": True, "output_attentions": True, "dtype": "float16"}
        values |= {"chunk_size_feed_forward": 5, "architectures": ["TNTModel"], "problem_type": "regression"}
        return {"config_common_kwargs": values | {"id2label": {0: "label"}, "label2id": {"label": "0"}}}
    if name.startswith("pipelines.test_pipelines_"):
        from .pipeline_stand_ins import stand_in

        return stand_in(name.removeprefix("pipelines.test_pipelines_"))
    return None


@functools.cache
def load(tiny_models: str | None = None) -> types.SimpleNamespace:
    """Imports the mixins from the located source.

    Args:
        tiny_models: folder with tiny checkpoints for the pipeline tests (see `pipeline_stand_ins.write_tiny_models`),
            in place of those on the Hub.

    Returns:
        A namespace with the modules `common`, `generation`, `training`, `pipeline`, `configuration`.
    """
    source = locate()
    sys.meta_path.insert(0, _Finder(source.folder))
    if tiny_models is not None:
        # Read by the pipeline module at import.
        os.environ["TRANSFORMERS_TINY_MODEL_PATH"] = tiny_models
    return types.SimpleNamespace(
        source=source,
        common=importlib.import_module(f"{PACKAGE}.test_modeling_common"),
        generation=importlib.import_module(f"{PACKAGE}.{GENERATION_TESTS}"),
        training=importlib.import_module(f"{PACKAGE}.test_training_mixin"),
        pipeline=importlib.import_module(f"{PACKAGE}.test_pipeline_mixin"),
        configuration=importlib.import_module(f"{PACKAGE}.test_configuration_common"),
    )
