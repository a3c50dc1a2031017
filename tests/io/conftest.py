"""Real tokenizers for the tests of text, each fetched once and loaded once."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import pytest

from microllm.errors import UnavailableError
from microllm.io.demo import fetch_demo
from microllm.io.resolve import ModelSource
from microllm.io.tokenizer import Tokenizer, load_tokenizer

REPOSITORY = Path(__file__).resolve().parents[2]


def load_tool(name: str) -> ModuleType:
    """Import a program of tools/, which is no package."""
    spec = importlib.util.spec_from_file_location(name, REPOSITORY / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def unavailable(reason: str) -> NoReturn:
    """Skip for want of data, except in CI, where the data is part of the promise."""
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


def test_data(name: str) -> Path:
    tool = load_tool("fetch_test_data")
    try:
        return tool.fetch(name)
    except tool.FetchError as error:
        unavailable(str(error))


@pytest.fixture(scope="session", name="load_tool")
def load_tool_fixture() -> Callable[[str], ModuleType]:
    return load_tool


@pytest.fixture(scope="session")
def demo_source() -> ModelSource:
    try:
        return ModelSource("demo", fetch_demo(), "gguf")
    except UnavailableError as error:
        unavailable(str(error))


@pytest.fixture(scope="session")
def qwen3_directory() -> Path:
    return test_data("qwen3-tokenizer")


@pytest.fixture(scope="session")
def llama31_directory() -> Path:
    return test_data("llama31-tokenizer")


@pytest.fixture(scope="session")
def deepseek_directory() -> Path:
    return test_data("deepseek-tokenizer")


@pytest.fixture(scope="session")
def smollm2(demo_source: ModelSource) -> Tokenizer:
    return load_tokenizer(demo_source)


@pytest.fixture(scope="session")
def qwen3(qwen3_directory: Path) -> Tokenizer:
    return load_tokenizer(ModelSource("qwen3", qwen3_directory, "directory"))


@pytest.fixture(scope="session")
def llama31(llama31_directory: Path) -> Tokenizer:
    return load_tokenizer(ModelSource("llama31", llama31_directory, "directory"))


@pytest.fixture(scope="session")
def deepseek(deepseek_directory: Path) -> Tokenizer:
    return load_tokenizer(ModelSource("deepseek", deepseek_directory, "directory"))


@pytest.fixture(scope="session", params=["smollm2", "qwen3", "llama31"])
def real_tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return request.getfixturevalue(request.param)
