"""The rules that hold the package together: who may import whom, what nobody may call, how long things may be.

Each rule is a function from a parsed source to its violations, and is tested on small sources that break it.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "dpdask"

MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 60
P90_FUNCTION_LINES = 40

# A room is a package or module directly inside dpdask. Everybody may import the base; the base knows only what stands before it.
BASE = ("version", "errors", "documents", "schema", "codec", "cells")
MATHS = {"kernels"}
ROWS = MATHS | {"streams", "privacy", "stats", "channels", "references"}  # among themselves in this order: see SIBLINGS
MAY_IMPORT: dict[str, set[str]] = {
    "kernels": set(),
    "streams": MATHS,
    "privacy": MATHS | {"streams"},
    "stats": MATHS | {"streams", "privacy"},
    "channels": MATHS | {"streams", "privacy", "stats"},
    "references": MATHS | {"streams", "privacy", "stats", "channels"},
    "inference": MATHS | {"channels", "references", "stats"},
    "mechanisms": ROWS,
    "io": set(),
    "simulate": set(),
    "reports": ROWS | {"mechanisms"},
    "evaluation": ROWS | {"mechanisms"},
    "engine": ROWS | {"mechanisms", "io"},
    "jobs": ROWS | {"mechanisms", "io", "engine", "reports"},
    "frames": ROWS | {"mechanisms", "io", "engine", "reports"},
    "intervals": ROWS | {"mechanisms", "io", "engine", "reports"},
    "local": {"kernels", "mechanisms", "references", "engine", "frames"},
    "survey": ROWS | {"mechanisms", "reports"},
    "synthesis": ROWS | {"mechanisms", "io", "engine", "reports"},
    "histograms": ROWS | {"mechanisms", "io", "engine", "reports"},
    "connect": {"jobs"},
    "cli": ROWS | {"mechanisms", "inference", "io", "engine", "reports", "jobs", "connect", "simulate"},
    "__init__": ROWS
    | {"mechanisms", "inference", "io", "engine", "reports", "frames", "intervals", "local", "survey", "synthesis", "histograms", "jobs", "simulate"},
    "__main__": {"cli"},
}
STRICTER: dict[str, set[str]] = {"kernels": set(), "io": {"schema", "errors"}, "streams": {"errors"}, "simulate": {"errors"}, "__main__": set()}
DASK_ROOMS = {"engine", "connect"}

RANDOM_MODULES = {"random", "secrets", "numpy.random", "randomgen"}
RANDOM_ATTRIBUTES = {"default_rng", "urandom", "getrandbits", "SystemRandom"}
SIMULATE_MAY = {"PCG64", "Generator", "SeedSequence"}
GENERATOR_MAKERS = {"Generator", "PCG64", "SeedSequence", "AESCounter", "RandomState"}


@dataclass(frozen=True)
class Source:
    """A module's text with its place: `engine.work` for dpdask/engine/work.py, `engine.__init__` for a package's own."""

    module: str
    text: str

    @property
    def room(self) -> str:
        return self.module.split(".")[0]

    @property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)


def sources() -> list[Source]:
    files = sorted(PACKAGE.rglob("*.py"))
    return [Source(".".join(file.relative_to(PACKAGE).with_suffix("").parts), file.read_text(encoding="utf-8")) for file in files]


def imports(source: Source) -> Iterator[tuple[str, int]]:
    """Every imported module, wherever the import stands; `from a import b` gives both a and a.b."""
    package = ["dpdask", *source.module.split(".")[:-1]]
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parent = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*parent, *([node.module] if node.module else [])])
            yield base, node.lineno
            yield from ((f"{base}.{alias.name}", node.lineno) for alias in node.names)


def ours(source: Source) -> Iterator[tuple[str, int]]:
    """The imported modules of this package, without its name: `kernels.channel`; names inside a module are cut by the room alone."""
    known = set(MAY_IMPORT) | set(BASE)
    for name, line in imports(source):
        if name == "dpdask" and any(other.startswith("dpdask.") and at == line for other, at in imports(source)):
            continue  # `from dpdask import kernels`: the submodule is judged
        if name == "dpdask" or name.startswith("dpdask."):
            inner = name.removeprefix("dpdask").lstrip(".")
            yield (inner if inner.split(".")[0] in known else "__init__"), line


def wrong_arrows(source: Source) -> Iterator[str]:
    room = source.room
    if room not in MAY_IMPORT and room not in BASE:
        yield f"{source.module}: a room that this test does not know; give it its arrows"
        return
    base = set(BASE[: BASE.index(room)]) if room in BASE else STRICTER.get(room, set(BASE))
    allowed = base | MAY_IMPORT.get(room, set()) | {room}
    for name, line in ours(source):
        if name.split(".")[0] not in allowed:
            yield f"{source.module}:{line}: {room} may not import {name}"


def stray_dask(source: Source) -> Iterator[str]:
    for name, line in imports(source):
        if name.split(".")[0] in ("dask", "distributed") and source.room not in DASK_ROOMS:
            yield f"{source.module}:{line}: only {' and '.join(sorted(DASK_ROOMS))} import {name}"


def _dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def stray_randomness(source: Source) -> Iterator[str]:
    """Randomness has one door: streams. Elsewhere a Generator may be named (a type), not made."""
    if source.room == "streams":
        return
    simulate = source.room == "simulate"
    for name, line in imports(source):
        module, _, last = name.rpartition(".")
        if module == "numpy.random" and (last == "Generator" or (simulate and last in SIMULATE_MAY)):
            continue
        if name == "numpy.random" and any(f"numpy.random.{allowed}" in {n for n, at in imports(source) if at == line} for allowed in SIMULATE_MAY):
            continue  # `from numpy.random import Generator`: the names are judged one by one
        if name in RANDOM_MODULES or module in RANDOM_MODULES or last in RANDOM_ATTRIBUTES:
            yield f"{source.module}:{line}: {name} belongs to streams"
    tree = source.tree
    types = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == "Generator"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (
            (_dotted(node) in ("np.random", "numpy.random") and id(node) not in types) or node.attr in RANDOM_ATTRIBUTES
        ):
            yield f"{source.module}:{node.lineno}: {_dotted(node)} belongs to streams"
        if isinstance(node, ast.Call) and not simulate and _dotted(node.func).rpartition(".")[2] in GENERATOR_MAKERS:
            yield f"{source.module}:{node.lineno}: a generator is made outside streams"


def banned_calls(source: Source) -> Iterator[str]:
    for name, line in imports(source):
        if name.split(".")[0] in ("pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"):
            yield f"{source.module}:{line}: {name} runs what it reads"
    for node in ast.walk(source.tree):
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle" and not (isinstance(node.value, ast.Constant) and node.value.value is False):
            yield f"{source.module}:{node.value.lineno}: allow_pickle runs what it reads"
        if not isinstance(node, ast.Call):
            continue
        called = _dotted(node.func) or (f"?.{node.func.attr}" if isinstance(node.func, ast.Attribute) else "")
        last = called.rpartition(".")[2]
        if called == "print":
            yield f"{source.module}:{node.lineno}: print; stdout carries only the command line's result"
        if last in ("compute", "persist") and source.room != "engine":
            yield f"{source.module}:{node.lineno}: {last} outside the engine"
        if last in ("Client", "LocalCluster") and source.room != "connect":
            yield f"{source.module}:{node.lineno}: {last} is made outside connect"


def functions(source: Source) -> Iterator[tuple[str, int, int]]:
    """Name, line and length of every function: its lines without its docstring."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0]
            doc = first.end_lineno - first.lineno + 1 if ast.get_docstring(node, clean=False) is not None else 0
            yield f"{source.module}.{node.name}", node.lineno, node.end_lineno - node.lineno + 1 - doc


def too_long(source: Source) -> Iterator[str]:
    n_lines = len(source.text.splitlines())
    if n_lines > MAX_FILE_LINES:
        yield f"{source.module}: {n_lines} lines, at most {MAX_FILE_LINES}"
    for name, line, length in functions(source):
        if length > MAX_FUNCTION_LINES:
            yield f"{source.module}:{line}: {name} has {length} lines, at most {MAX_FUNCTION_LINES}"


def undocumented(source: Source) -> Iterator[str]:
    def visit(node: ast.Module | ast.ClassDef, name: str) -> Iterator[str]:
        if ast.get_docstring(node) is None:
            yield f"{name}: no docstring"
        for child in node.body:
            if isinstance(child, ast.ClassDef) and not child.name.startswith("_"):
                yield from visit(child, f"{name}.{child.name}")
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and not child.name.startswith("_") and ast.get_docstring(child) is None:
                yield f"{name}.{child.name}: no docstring"

    yield from visit(source.tree, source.module)


def unreasoned(source: Source) -> Iterator[str]:
    """Silenced checkers: `# type: ignore[code]  # reason`, `# noqa: CODE - reason`."""
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type != tokenize.COMMENT:
            continue
        comment = token.string
        silent = re.search(r"type:\s*ignore", comment) and not re.search(r"type: ignore\[[\w, -]+\]\s*# \S.+", comment)
        loud = re.search(r"noqa", comment) and not re.search(r"noqa: [A-Z]+\d+(, ?[A-Z]+\d+)* - \S.+", comment)
        if silent or loud:
            yield f"{source.module}:{token.start[0]}: {comment} gives no code or no reason"


RULES = [wrong_arrows, stray_dask, stray_randomness, banned_calls, too_long, undocumented, unreasoned]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_package_keeps_the_rule(rule):
    assert [violation for source in sources() for violation in rule(source)] == []


def test_functions_are_short():
    lengths = sorted(length for source in sources() for _, _, length in functions(source))
    assert lengths[int(0.9 * len(lengths))] <= P90_FUNCTION_LINES


def test_the_package_is_there():
    rooms = {source.room for source in sources()}
    assert {"kernels", "engine", "io", "jobs", "cli"} <= rooms


def test_the_arrows_have_no_cycle():
    def reach(room: str, seen: tuple[str, ...]) -> None:
        assert room not in seen, " -> ".join([*seen, room])
        for inner in MAY_IMPORT.get(room, set()):
            reach(inner, (*seen, room))

    for room in MAY_IMPORT:
        reach(room, ())


BAD = [
    (wrong_arrows, "kernels.x", "from dpdask.errors import DpdaskError"),
    (wrong_arrows, "kernels.x", "def f():\n    import dpdask.codec"),
    (wrong_arrows, "kernels.x", "from ..schema import Schema"),
    (wrong_arrows, "kernels.x", "from .. import schema"),
    (wrong_arrows, "io.x", "from dpdask.codec import LevelCodec"),
    (wrong_arrows, "io.x", "from dpdask import engine"),
    (wrong_arrows, "mechanisms.x", "from dpdask.io import Folder"),
    (wrong_arrows, "mechanisms.x", "from dpdask.engine.work import TableWork"),
    (wrong_arrows, "stats.x", "from dpdask.references import Holdout"),
    (wrong_arrows, "reports.x", "from dpdask.io import read_batches"),
    (wrong_arrows, "reports.card", "from dpdask.engine.frames import DIP"),
    (wrong_arrows, "reports.card", "from dpdask.evaluation.utility import compare"),
    (wrong_arrows, "evaluation.utility", "from dpdask.reports import card"),
    (wrong_arrows, "engine.x", "from dpdask.jobs.spec import Job"),
    (wrong_arrows, "engine.x", "from dpdask.reports import card"),
    (wrong_arrows, "engine.x", "from dpdask.frames import DIP"),
    (wrong_arrows, "jobs.x", "from dpdask.frames import DIP"),
    (wrong_arrows, "jobs.x", "from dpdask.cli import cli"),
    (wrong_arrows, "connect", "from dpdask.cli import cli"),
    (wrong_arrows, "jobs.x", "import dpdask"),
    (wrong_arrows, "engine.x", "from dpdask import DIP"),
    (wrong_arrows, "errors", "from dpdask.schema import Schema"),
    (wrong_arrows, "attic", "x = 1"),
    (stray_dask, "jobs.x", "def f():\n    from dask.base import tokenize"),
    (stray_dask, "cli", "import distributed"),
    (stray_dask, "kernels.x", "import dask.array as da"),
    (stray_randomness, "kernels.x", "import numpy as np\nx = np.random.rand(3)"),
    (stray_randomness, "kernels.x", "from numpy.random import default_rng"),
    (stray_randomness, "kernels.x", "from numpy.random import PCG64"),
    (stray_randomness, "kernels.x", "from numpy import random"),
    (stray_randomness, "engine.x", "import numpy.random as r"),
    (stray_randomness, "engine.x", "import random"),
    (stray_randomness, "engine.x", "from random import shuffle"),
    (stray_randomness, "engine.x", "from secrets import token_bytes"),
    (stray_randomness, "engine.x", "from os import urandom"),
    (stray_randomness, "engine.x", "import os\nx = os.urandom(3)"),
    (stray_randomness, "engine.x", "from numpy.random import Generator\nrng = Generator(bits)"),
    (stray_randomness, "mechanisms.x", "from randomgen import AESCounter"),
    (stray_randomness, "simulate", "from numpy.random import default_rng"),
    (banned_calls, "jobs.x", "import dask\ndask.compute(x)"),
    (banned_calls, "jobs.x", "frame[['a']].compute()"),
    (banned_calls, "jobs.x", "frame.persist()"),
    (banned_calls, "engine.x", "Client()"),
    (banned_calls, "engine.x", "print(x)"),
    (banned_calls, "engine.x", "import pickle"),
    (banned_calls, "engine.x", "from cloudpickle import dumps"),
    (banned_calls, "engine.x", "np.load(f, allow_pickle=True)"),
    (too_long, "x", "\n" * (MAX_FILE_LINES + 1)),
    (too_long, "x", "def f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES),
    (undocumented, "x", "x = 1"),
    (undocumented, "x", '"""Doc."""\ndef f(): ...'),
    (undocumented, "x", '"""Doc."""\nclass C: ...'),
    (undocumented, "x", '"""Doc."""\nclass C:\n    """Doc."""\n    def f(self): ...'),
    (unreasoned, "x", "x = 1  # type: ignore"),
    (unreasoned, "x", "x = 1  # type: ignore[arg-type]"),
    (unreasoned, "x", "x = 1  # noqa"),
    (unreasoned, "x", "x = 1  # noqa: S506"),
    (unreasoned, "x", "x = 1  # noqa: S506 -"),
]

GOOD = [
    (wrong_arrows, "kernels.x", "from dpdask.kernels import channel\nfrom .jit import jit\nimport numpy"),
    (wrong_arrows, "cli", "from dpdask import jobs\nfrom dpdask.connect import connected"),
    (wrong_arrows, "frames", "from dpdask.mechanisms.dip.card import release_card\nfrom dpdask.engine import frames"),
    (wrong_arrows, "io.x", "from dpdask.errors import DataError\nfrom dpdask.schema import Schema"),
    (stray_dask, "engine.x", "import dask"),
    (stray_randomness, "stats.x", "from numpy.random import Generator\ndef f(rng: Generator) -> Generator: ..."),
    (stray_randomness, "stats.x", "import numpy as np\ndef f(rng: np.random.Generator): ..."),
    (stray_randomness, "simulate", "from numpy.random import PCG64, Generator, SeedSequence\nrng = Generator(PCG64(SeedSequence(1)))"),
    (stray_randomness, "streams", "import secrets\nfrom randomgen import AESCounter"),
    (banned_calls, "engine.x", "import dask\ndask.compute(x)"),
    (banned_calls, "codec", "import pyarrow.compute as pc\npc.index_in(x)"),
    (banned_calls, "mechanisms.x", "np.load(f, allow_pickle=False)"),
    (too_long, "x", 'def f():\n    """' + "long\n" * MAX_FUNCTION_LINES + '    """\n    return 1'),
    (undocumented, "x", '"""Doc."""\ndef _f(): ...\nclass _C:\n    def f(self): ...\nclass D:\n    """Doc."""\n    def __repr__(self): ...'),
    (unreasoned, "x", "x = 1  # type: ignore[arg-type]  # pyarrow is untyped\ny = 2  # noqa: S506 - a SafeLoader"),
    (unreasoned, "x", 's = "# noqa"'),
]


@pytest.mark.parametrize(("rule", "module", "text"), BAD, ids=lambda value: getattr(value, "__name__", None))
def test_a_rule_can_fail(rule, module, text):
    assert list(rule(Source(module, text)))


@pytest.mark.parametrize(("rule", "module", "text"), GOOD, ids=lambda value: getattr(value, "__name__", None))
def test_a_rule_lets_good_sources_pass(rule, module, text):
    assert list(rule(Source(module, text))) == []
