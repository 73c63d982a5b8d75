"""Every name of TensorRT that this package uses, against the real bindings of TensorRT 11.4.

The bindings are NVIDIA's own, from the package index; the libraries beneath them are compiled stand-ins.
This shows that names, enums, parameters and callbacks are right, and nothing of what the library computes.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
PACKAGE = HERE.parents[2] / "qworker"
LIBRARIES = ("libnvinfer", "libnvinfer_plugin", "libnvonnxparser")

RECEIVERS: Mapping[str, str] = {
    "builder": "Builder",
    "network": "INetworkDefinition",
    "tensor": "ITensor",
    "parser": "OnnxParser",
    "error": "ParserError",
    "config": "IBuilderConfig",
    "profile": "IOptimizationProfile",
    "cache": "ITimingCache",
    "runtime": "Runtime",
    "engine": "ICudaEngine",
    "context": "IExecutionContext",
    "_runtime": "Runtime",
    "_engine": "ICudaEngine",
    "_context": "IExecutionContext",
}
"""What variables of these names hold in the modules that use TensorRT; a house rule of theirs."""
DATATYPE_ONLY = {"itemsize"}  # of what get_tensor_dtype gives

needs_bindings = pytest.mark.skipif(
    find_spec("tensorrt_bindings") is None, reason="tensorrt-cu13-bindings is for Linux on x86-64 only"
)
pytestmark = needs_bindings


@dataclass(frozen=True)
class Surface:
    """What the bindings offer."""

    version: str
    names: frozenset[str]
    classes: Mapping[str, frozenset[str]]
    parameters: Mapping[str, list[str]]
    calls: Mapping[str, Any]


@pytest.fixture(scope="session")
def surface(tmp_path_factory: pytest.TempPathFactory) -> Surface:
    """Compile the stand-ins, and ask the bindings in a process of their own."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler: install gcc to run the contract test")
    folder = tmp_path_factory.mktemp("tensorrt")
    libs, package = folder / "tensorrt_libs", folder / "tensorrt"
    for each in (libs, package):
        each.mkdir()
    for name in LIBRARIES:
        target = libs / f"{name}.so.11"
        flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Werror", f"-Wl,-soname,{target.name}"]
        subprocess.run([compiler, *flags, "-o", str(target), str(HERE / "stubs.c")], check=True)
    load = "import ctypes, pathlib\nfor name in pathlib.Path(__file__).parent.glob('*.so.11'): ctypes.CDLL(str(name))\n"
    (libs / "__init__.py").write_text(load)
    (package / "__init__.py").write_text("from tensorrt_bindings import *\nfrom tensorrt_bindings import __version__\n")
    answer = subprocess.run(
        [sys.executable, str(HERE / "surface.py")],
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    told = json.loads(answer.stdout)
    classes = {name: frozenset(attributes) for name, attributes in told["classes"].items()}
    return Surface(told["version"], frozenset(told["names"]), classes, told["parameters"], told["calls"])


def modules() -> list[Path]:
    """The modules that use TensorRT."""
    found = sorted([*PACKAGE.glob("engine/tensorrt*.py"), *PACKAGE.glob("engine/tensorrt/**/*.py")])
    return [*found, *sorted(PACKAGE.glob("build/tensorrt*.py"))]


def chains(path: Path) -> Iterator[tuple[int, str, list[str]]]:
    """(line, what it starts from, attributes) of each dotted expression; ``self._trt.X`` starts from ``trt``."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        attributes: list[str] = []
        here: ast.AST = node
        while isinstance(here, ast.Attribute):
            attributes.insert(0, here.attr)
            here = here.value
        if isinstance(here, ast.Name) and attributes:
            names = [here.id, *attributes]
            for i, name in enumerate(names[:-1]):
                if name.lstrip("_") == "trt" or name in RECEIVERS:
                    yield node.lineno, name.lstrip("_") if name.lstrip("_") == "trt" else name, names[i + 1 :]
                    break


def wrong(surface: Surface, start: str, attributes: list[str]) -> str | None:
    """What the bindings do not have of an expression."""
    if start == "trt":
        if attributes[0] not in surface.names:
            return f"trt.{attributes[0]}"
        owner = surface.classes.get(attributes[0])
        if owner is not None and len(attributes) > 1 and attributes[1] not in owner | DATATYPE_ONLY | {"__members__"}:
            return f"trt.{attributes[0]}.{attributes[1]}"
        return None
    owner_name = RECEIVERS[start]
    return None if attributes[0] in surface.classes[owner_name] else f"{owner_name}.{attributes[0]}"


def test_the_bindings_are_those_that_we_are_written_for(surface: Surface) -> None:
    """Cards and docs speak of 11.4; another version needs another look."""
    assert surface.version.startswith("11.4.")


@pytest.mark.parametrize("path", modules(), ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_name_exists(surface: Surface, path: Path) -> None:
    """Names, enum members and attributes of what the library's objects are."""
    missing = [
        f"{path.name}:{line} {what}" for line, start, rest in chains(path) if (what := wrong(surface, start, rest))
    ]
    assert not missing


def test_names_are_found_and_missing_ones_are_told(surface: Surface, tmp_path: Path) -> None:
    """The test itself: what went away with TensorRT 10 and 11 does not pass."""
    path = tmp_path / "old.py"
    path.write_text(
        "trt.BuilderFlag.FP16\nself._trt.IInt8EntropyCalibrator2\nconfig.max_workspace_size = 1\n"
        "self._engine.get_binding_shape(0)\nkit.trt.Runtime\nself._context.execute_async_v3(0)\n"
    )
    told = {what for _, start, rest in chains(path) if (what := wrong(surface, start, rest))}
    expected = {"trt.BuilderFlag.FP16", "trt.IInt8EntropyCalibrator2"}
    assert told == expected | {"IBuilderConfig.max_workspace_size", "ICudaEngine.get_binding_shape"}


def test_the_builder_is_seen_to_use_the_library() -> None:
    """Against a scan that finds nothing: the builder alone uses dozens of names."""
    used = {(start, rest[0]) for path in modules() for _, start, rest in chains(path)}
    assert len(used) >= 40
    assert {
        ("trt", "OnnxParser"),
        ("builder", "build_serialized_network"),
        ("config", "add_optimization_profile"),
    } <= used


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("Builder.build_serialized_network", ["network", "config"]),
        ("Builder.create_network", ["flags"]),
        ("OnnxParser.parse", ["model", "path"]),
        ("IBuilderConfig.set_memory_pool_limit", ["pool", "pool_size"]),
        ("IBuilderConfig.set_timing_cache", ["cache", "ignore_mismatch"]),
        ("IBuilderConfig.create_timing_cache", ["serialized_timing_cache"]),
        ("IOptimizationProfile.set_shape", ["input", "min", "opt", "max"]),
        ("IOptimizationProfile.set_shape_input", ["input", "min", "opt", "max"]),
        ("IExecutionContext.set_optimization_profile_async", ["profile_index", "stream_handle"]),
        ("IExecutionContext.set_input_shape", ["name", "shape"]),
        ("IExecutionContext.set_tensor_address", ["name", "memory"]),
        ("IExecutionContext.execute_async_v3", ["stream_handle"]),
        ("ICudaEngine.get_tensor_profile_shape", ["name", "profile_index"]),
        ("ICudaEngine.get_device_memory_size_for_profile_v2", ["profile_index"]),
        ("IExecutionContext.set_device_memory", ["memory", "size"]),
        ("IExecutionContext.set_output_allocator", ["name", "output_allocator"]),
    ],
)
def test_parameters_come_in_the_order_that_we_use(surface: Surface, method: str, expected: list[str]) -> None:
    """We pass by position: a swapped pair would be taken in silence."""
    assert [name for name in surface.parameters[method] if name != "self"] == expected


def test_callbacks_get_what_we_take(surface: Surface) -> None:
    """Overrides are called by the library's own tables, in this order."""
    calls = surface.calls
    assert calls["IProgressMonitor.phase_start"] == ["phase", "parent", 7]
    assert calls["IProgressMonitor.step_complete"] == ["phase", 3]
    assert calls["IProgressMonitor.phase_finish"] == ["phase"]
    assert calls["ILogger.log"] == ["WARNING", "said by the library"]
    # name, memory, size, alignment, stream
    assert calls["IOutputAllocator.reallocate_output_async"] == ["y", 1, 2, 3, 4]
    assert calls["IOutputAllocator memory"] == 99
    assert calls["IOutputAllocator.notify_shape"] == ["y", [5, 6]]
    assert calls["IGpuAsyncAllocator.allocate_async"] == [1, 2, 3, 4]  # size, alignment, flags, stream
    told = calls["IOutputAllocator, in words"]
    assert "def reallocate_output_async(self, tensor_name, memory, size, alignment, stream):" in told
    assert "def notify_shape(self, tensor_name, shape):" in told


def test_a_builder_that_does_not_start_raises_what_we_catch(surface: Surface) -> None:
    """A null pointer from the library becomes a TypeError, and not a crash."""
    assert "nullptr" in surface.calls["Builder of nothing"]
