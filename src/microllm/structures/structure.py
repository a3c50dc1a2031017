"""Structures: regions of a decoder model, as data: boundary, weights, calibration points, gates, and a reference.

Place: ``catalog/NAME/structure.yaml`` declares one, ``reference.py`` beside it computes it in plain torch. Bindings say
where a host has it, implementations how it is run fast. Knows no host and no kernel.

A structure's digest is the sha256 of its yaml's bytes. Versions stand side by side: ``decoder_ffn`` is the newest,
``decoder_ffn@1`` that one. A reference takes three mappings (inputs, weights by slot, constants) and returns outputs.
"""

from __future__ import annotations

import ast
import importlib.util
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml
from torch import Tensor

from microllm.errors import StructureError
from microllm.evidence.journal import sha256_hex

Reference = Callable[[Mapping[str, Tensor], Mapping[str, Tensor], Mapping[str, Any]], Mapping[str, Tensor]]
CATALOG = Path(__file__).with_name("catalog")
_NAME = re.compile(r"[a-z][a-z0-9_]*")
_OPERATORS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Port:
    """A tensor of a boundary or a weight slot: its name and its dims, each a symbol or an expression of symbols."""

    name: str
    dims: tuple[str, ...]
    dtype: str = "@binding"
    optional: bool = False


@dataclass(frozen=True, kw_only=True)
class Structure:
    """One version of one structure.

    ``kind`` "region" has boundary, weights and a reference; "pipeline" has stages and states and is compared with an
    eager run of the host.
    """

    name: str
    version: int
    kind: Literal["region", "pipeline"]
    description: str
    digest: str
    folder: Path
    inputs: tuple[Port, ...] = ()
    outputs: tuple[Port, ...] = ()
    weights: tuple[Port, ...] = ()
    constants: tuple[str, ...] = ()
    points: tuple[str, ...] = ()
    variants: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    gates: Mapping[str, Any] = field(default_factory=dict)
    stages: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    states: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    embeds: tuple[str, ...] = ()
    entry: tuple[str, str] | None = None

    @property
    def id(self) -> str:
        """Return name@version."""
        return f"{self.name}@{self.version}"

    @property
    def reference(self) -> Reference:
        """Return the plain-torch reference.

        Raises:
            StructureError: a pipeline, which has none.
        """
        if self.entry is None:
            raise StructureError(f"got {self.id}, a pipeline; need a region; compare it with an eager run of its host")
        return load_attribute(self.folder / self.entry[0], self.entry[1])

    def check_weights(self, weights: Mapping[str, Tensor], where: str) -> dict[str, int]:
        """Return the symbols' sizes; every slot must be there (unless optional) and have its dims.

        Raises:
            StructureError: a slot is missing, unknown, or of another shape.
        """
        return self._check("slot", self.weights, weights, {}, where)

    def check_inputs(self, inputs: Mapping[str, Tensor], sizes: Mapping[str, int], where: str) -> dict[str, int]:
        """Return the symbols' sizes, given those that the weights fixed.

        Raises:
            StructureError: an input is missing, unknown, or of another shape.
        """
        return self._check("input", self.inputs, inputs, sizes, where)

    def _check(
        self, kind: str, ports: Iterable[Port], given: Mapping[str, Tensor], sizes: Mapping[str, int], where: str
    ) -> dict[str, int]:
        known = {port.name: port for port in ports}
        missing = [name for name, port in known.items() if not port.optional and name not in given]
        unknown = sorted(set(given) - set(known))
        if missing or unknown:
            raise StructureError(
                f"{where}: got {kind}s {sorted(given)}; need those of {self.id}: missing {missing}, unknown {unknown}"
            )
        solved = dict(sizes)
        shapes = [(known[name], tuple(tensor.shape)) for name, tensor in given.items()]
        for port, shape in shapes:
            if len(shape) != len(port.dims):
                raise StructureError(f"{where}: got {port.name} {shape}; need {len(port.dims)} dims {port.dims}")
            for dim, size in zip(port.dims, shape, strict=True):
                if dim.isidentifier() and solved.setdefault(dim, size) != size:
                    raise StructureError(f"{where}: got {port.name} {shape}; need {dim} = {solved[dim]}")
        for port, shape in shapes:  # expressions, once their symbols are known
            for dim, size in zip(port.dims, shape, strict=True):
                needed = evaluate(dim, solved)
                if needed is not None and needed != size:
                    raise StructureError(f"{where}: got {port.name} {shape}; need {dim} = {needed}")
        return solved


def evaluate(expression: str, sizes: Mapping[str, int]) -> int | None:
    """Return what a dim such as "(H + 2*G) * K" is, or None while a symbol of it is unknown.

    Raises:
        StructureError: it is no expression of symbols, whole numbers, +, -, * and //.
    """

    def value(node: ast.expr) -> int | None:
        match node:
            case ast.Name(id=name):
                return sizes.get(name)
            case ast.Constant(value=int(number)):
                return number
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                a, b = value(left), value(right)
                return None if a is None or b is None else _OPERATORS[type(op)](a, b)
        raise StructureError(f"got dim {expression!r}; need symbols, whole numbers, +, -, * and //")

    try:
        return value(ast.parse(expression, mode="eval").body)
    except SyntaxError as error:
        raise StructureError(f"got dim {expression!r}; need an expression such as '3*D'") from error


class Catalog:
    """The structures of some folders, by name and version."""

    def __init__(self, structures: Iterable[Structure]) -> None:
        self._all: dict[str, dict[int, Structure]] = {}
        for each in structures:
            versions = self._all.setdefault(each.name, {})
            if each.version in versions:
                raise StructureError(f"got {each.id} twice, in {each.folder} too; need one; raise its version")
            versions[each.version] = each

    def names(self) -> list[str]:
        """Return every name, sorted."""
        return sorted(self._all)

    def all(self) -> list[Structure]:
        """Return every version of every structure."""
        return [versions[number] for _, versions in sorted(self._all.items()) for number in sorted(versions)]

    def get(self, name: str) -> Structure:
        """Return the newest version of a name, or the one that ``name@version`` says.

        Raises:
            StructureError: there is none; the text says which there are.
        """
        wanted, _, version = name.partition("@")
        versions = self._all.get(wanted)
        if versions is None:
            raise StructureError(f"got structure {name!r}; need one of {', '.join(self.names())}")
        number = int(version) if version.isdigit() else max(versions) if not version else -1
        if number not in versions:
            raise StructureError(
                f"got {name!r}; need a version that there is: {', '.join(f'{wanted}@{v}' for v in sorted(versions))}"
            )
        return versions[number]


def load_catalog(folders: Iterable[Path] = ()) -> Catalog:
    """Return the package's structures and those of ``folders`` (each laid out as the package's own).

    Raises:
        StructureError: a document is malformed, or a version is there twice.
    """
    return Catalog(_read(path.parent) for root in (CATALOG, *folders) for path in sorted(root.glob("*/structure.yaml")))


def load_attribute(path: Path, name: str) -> Any:
    """Return what a Python file that belongs to no package defines under ``name``.

    Raises:
        StructureError: there is no such file or name.
    """
    found = _module(path.resolve()).get(name)
    if found is None:
        raise StructureError(f"got {path}; need it to define {name!r}")
    return found


@cache
def _module(path: Path) -> dict[str, Any]:
    spec = importlib.util.spec_from_file_location(f"microllm_structures_{sha256_hex(str(path))[:12]}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise StructureError(f"got {path}; need a Python file there")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return vars(module)


def _read(folder: Path) -> Structure:
    data = (folder / "structure.yaml").read_bytes()
    try:
        return _parsed(yaml.safe_load(data), folder, sha256_hex(data))
    except (yaml.YAMLError, KeyError, TypeError, AttributeError) as error:
        raise StructureError(
            f"got {folder / 'structure.yaml'}, which is no structure: {error!r}; correct it"
        ) from error


def _parsed(document: dict[str, Any], folder: Path, digest: str) -> Structure:
    name, version, kind = document["structure"], document["version"], document.get("kind", "region")
    if not _NAME.fullmatch(name) or folder.name not in (name, f"{name}@{version}") or not isinstance(version, int):
        raise StructureError(
            f"got {name!r} version {version!r} in {folder}; need a name of a-z, 0-9 and _ that is its folder's, "
            "and a whole version"
        )
    if kind not in ("region", "pipeline"):
        raise StructureError(f"{name}: got kind {kind!r}; need region or pipeline")
    boundary, reference = document.get("boundary", {}), document.get("reference")
    if kind == "region" and not (reference and (folder / reference["module"]).is_file()):
        raise StructureError(f"{name}: got no reference; need one beside it: without it nothing can be judged")
    structure = Structure(
        name=name, version=version, kind=kind, description=document["description"], digest=digest, folder=folder,
        inputs=_ports(boundary.get("inputs", ())), outputs=_ports(boundary.get("outputs", ())),
        weights=_ports(document.get("weights", ())), constants=tuple(document.get("constants", ())),
        points=tuple(document.get("calibration", {}).get("points", ())),
        variants={axis: tuple(map(str, values)) for axis, values in document.get("variants", {}).items()},
        gates=document.get("gates", {}), stages=document.get("stages", {}), states=document.get("states", {}),
        embeds=tuple(document.get("embedded_regions", ())),
        entry=(reference["module"], reference["entrypoint"]) if reference else None,
    )  # fmt: skip
    symbols = set(boundary.get("symbolic_dims", ()))
    for port in (*structure.inputs, *structure.outputs, *structure.weights):
        unknown = {word for dim in port.dims for word in re.findall(r"[A-Za-z_]\w*", dim)} - symbols
        if unknown:
            raise StructureError(f"{name}: got dims {sorted(unknown)} of {port.name}; need them in symbolic_dims")
        for dim in port.dims:
            evaluate(dim, {})
    return structure


def _ports(entries: Iterable[Mapping[str, Any]]) -> tuple[Port, ...]:
    return tuple(
        Port(
            e.get("name") or e["slot"], tuple(str(d) for d in e["dims"]), e.get("dtype", "@binding"),
            bool(e.get("optional", False)),
        )
        for e in entries
    )  # fmt: skip
