"""The rules that hold the package together (docs/explanation/design.md, Rooms): who may import whom, what nobody may call, how long things may be.

Each rule is a function from a parsed source to its violations, and is tested on small sources that break it.
"""

from __future__ import annotations

import ast
import io
import re
import runpy
import tokenize
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import dpdask
from dpdask import inference

PACKAGE = Path(__file__).parents[1] / "dpdask"

MAX_FILE_LINES = 800
MAX_FUNCTION_LINES = 60
EMITTERS = {
    "kernels.correlation._sums_code",
    "kernels.decode._race_code",
}  # of LLVM code, one line after the other
P90_FUNCTION_LINES = 40
MAX_COLUMNS = 100  # of 95 % of the lines: the formatter leaves long texts as they are
MAX_ENGINE_ARROWS = 30
MAX_MECHANISM_FILES = 8
MECHANISMS = {
    "dip",
    "copula",
    "marginals",
    "interval",
}  # and `histogram`, which is also a reference

# A room is a package or module directly inside dpdask. Everybody may import the base; the base knows only what stands before it.
_TOOLS = ("version", "errors", "startup", "steps", "html")
BASE = (
    *_TOOLS,
    "arrays",
    "archive",
    "documents",
    "conditions",
    "domains",
    "scales",
    "schema",
    "codec",
    "computed",
    "cells",
    "rules",
)
MATHS = {"kernels"}
ROWS = MATHS | {
    "streams",
    "privacy",
    "stats",
    "channels",
    "references",
}  # among themselves in this order: see SIBLINGS
MAY_IMPORT = {
    "kernels": set(),
    "streams": MATHS,
    "privacy": MATHS | {"streams"},
    "stats": MATHS | {"streams", "privacy"},
    "channels": MATHS | {"streams", "privacy", "stats"},
    "references": MATHS | {"streams", "privacy", "stats", "channels"},
    "analysis": ROWS - {"channels"} | {"inference", "mechanisms", "io", "engine"},
    "inference": MATHS | {"channels", "references", "stats", "mechanisms"},
    "mechanisms": ROWS,
    "io": set(),
    "simulate": set(),
    "engine": ROWS | {"mechanisms", "io"},
    "verifier": set(),
    "page": {"privacy", "mechanisms", "io", "verifier"},
    "jobs": ROWS | {"mechanisms", "io", "engine", "connect", "page"},
    "estimators": ROWS | {"mechanisms", "io", "engine", "page", "terminal"},
    "evaluation": ROWS | {"mechanisms", "engine", "estimators", "analysis", "inference", "io"},
    "local": {"kernels", "mechanisms", "references", "estimators"},
    "survey": ROWS | {"mechanisms"},
    "connect": {"streams", "io", "engine"},
    "schemas": {"mechanisms", "jobs"},
    "terminal": {"page", "privacy", "simulate"},
    "cli": ROWS
    | {
        "analysis",
        "mechanisms",
        "inference",
        "io",
        "engine",
        "jobs",
        "connect",
        "simulate",
        "schemas",
        "terminal",
        "evaluation",
    },
    "__init__": ROWS
    | {"analysis", "mechanisms", "engine", "estimators", "evaluation", "local", "page", "survey"},
    "__main__": {"cli"},
}
STRICTER = {
    "verifier": set(),  # it is copied, and runs without dpdask
    "kernels": {"arrays"},
    "io": {"arrays", "schema", "errors"},
    "streams": {"arrays", "errors"},
    "simulate": {"arrays", "errors"},
    "__main__": set(),
}
DASK_ROOMS = {"engine", "connect"}

RANDOM_MODULES = {"random", "secrets", "numpy.random"}
RANDOM_ATTRIBUTES = {"default_rng", "urandom", "getrandbits", "SystemRandom"}
SIMULATE_MAY = {"PCG64", "Generator", "SeedSequence"}
GENERATOR_MAKERS = {"Generator", "PCG64", "SeedSequence", "Stream", "RandomState"}
GENERATORS_MAY = {"analysis", "evaluation", "mechanisms.dip.tree"}  # draw what protects nobody

# names whose first word is a participle: it ends in -ed (`need`, `seed` and `embed` are verbs), or is irregular
IRREGULAR = "kept|written|drawn|spent|shown|known|told|chosen|frozen|broken|taken|made|given|found"
PARTICIPLE = re.compile(rf"(?!\w*eed|embed)(?:[a-z]+ed|{IRREGULAR})(?:_\w+)?")


@dataclass(frozen=True)
class Source:
    """A module's text with its place: `engine.work` for dpdask/engine/work.py, `engine.__init__` for a package's own."""

    module: str
    text: str

    @property
    def room(self):
        return self.module.split(".")[0]

    @property
    def tree(self):
        return parsed(self.text)


@cache
def parsed(text):
    """Return the tree of a source, which every rule reads and none changes."""
    return ast.parse(text)


@cache
def sources():
    files = sorted(PACKAGE.rglob("*.py"))
    return [
        Source(
            ".".join(file.relative_to(PACKAGE).with_suffix("").parts),
            file.read_text(encoding="utf-8"),
        )
        for file in files
    ]


def imports(source):
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


def ours(source):
    """The imported modules of this package, without its name: `kernels.channel`; names inside a module are cut by the room alone."""
    known = set(MAY_IMPORT) | set(BASE)
    for name, line in imports(source):
        if name == "dpdask" and any(
            other.startswith("dpdask.") and at == line for other, at in imports(source)
        ):
            continue  # `from dpdask import kernels`: the submodule is judged
        if name == "dpdask" or name.startswith("dpdask."):
            inner = name.removeprefix("dpdask").lstrip(".")
            yield (inner if inner.split(".")[0] in known else "__init__"), line


def wrong_arrows(source):
    room = source.room
    if room not in MAY_IMPORT and room not in BASE:
        yield f"{source.module}: a room that this test does not know; give it its arrows"
        return
    base = set(BASE[: BASE.index(room)]) if room in BASE else STRICTER.get(room, set(BASE))
    allowed = base | MAY_IMPORT.get(room, set()) | {room}
    for name, line in ours(source):
        if name.split(".")[0] not in allowed:
            yield f"{source.module}:{line}: {room} may not import {name}"


def stray_dask(source):
    for name, line in imports(source):
        if name.split(".")[0] in ("dask", "distributed") and source.room not in DASK_ROOMS:
            yield f"{source.module}:{line}: only {' and '.join(sorted(DASK_ROOMS))} import {name}"


def _dotted(node):
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def stray_randomness(source):
    """Randomness has one door: streams. Elsewhere a Generator may be named (a type), not made."""
    if source.room == "streams":
        return
    simulate = source.room == "simulate"
    for name, line in imports(source):
        module, _, last = name.rpartition(".")
        if module == "numpy.random" and (
            last == "Generator" or (simulate and last in SIMULATE_MAY)
        ):
            continue
        if name == "numpy.random" and any(
            f"numpy.random.{allowed}" in {n for n, at in imports(source) if at == line}
            for allowed in SIMULATE_MAY
        ):
            continue  # `from numpy.random import Generator`: the names are judged one by one
        if name in RANDOM_MODULES or module in RANDOM_MODULES or last in RANDOM_ATTRIBUTES:
            yield f"{source.module}:{line}: {name} belongs to streams"
    tree = source.tree
    types = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr == "Generator"
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (
            (_dotted(node) in ("np.random", "numpy.random") and id(node) not in types)
            or node.attr in RANDOM_ATTRIBUTES
        ):
            yield f"{source.module}:{node.lineno}: {_dotted(node)} belongs to streams"
        if (
            isinstance(node, ast.Call)
            and not simulate
            and _dotted(node.func).rpartition(".")[2] in GENERATOR_MAKERS
        ):
            yield f"{source.module}:{node.lineno}: a generator is made outside streams"
        if (
            isinstance(node, ast.Attribute)
            and node.attr == "seed_generator"
            and not {source.module, source.module.partition(".")[0]} & GENERATORS_MAY
        ):
            yield f"{source.module}:{node.lineno}: what protects somebody is drawn from words"


def banned_calls(source):
    for name, line in imports(source):
        if name.split(".")[0] in ("pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"):
            yield f"{source.module}:{line}: {name} runs what it reads"
    for node in ast.walk(source.tree):
        if (
            isinstance(node, ast.keyword)
            and node.arg == "allow_pickle"
            and not (isinstance(node.value, ast.Constant) and node.value.value is False)
        ):
            yield f"{source.module}:{node.value.lineno}: allow_pickle runs what it reads"
        if not isinstance(node, ast.Call):
            continue
        called = _dotted(node.func) or (
            f"?.{node.func.attr}" if isinstance(node.func, ast.Attribute) else ""
        )
        last = called.rpartition(".")[2]
        if called == "print":
            yield f"{source.module}:{node.lineno}: print; stdout carries only the command line's result"
        if last in ("compute", "persist") and source.room != "engine":
            yield f"{source.module}:{node.lineno}: {last} outside the engine"
        if last in ("Client", "LocalCluster") and source.room != "connect":
            yield f"{source.module}:{node.lineno}: {last} is made outside connect"


def functions(source):
    """Name, line and length of every function: its lines without its docstring."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0]
            doc = (
                first.end_lineno - first.lineno + 1
                if ast.get_docstring(node, clean=False) is not None
                else 0
            )
            yield (
                f"{source.module}.{node.name}",
                node.lineno,
                node.end_lineno - node.lineno + 1 - doc,
            )


def too_long(source):
    n_lines = len(source.text.splitlines())
    if n_lines > MAX_FILE_LINES:
        yield f"{source.module}: {n_lines} lines, at most {MAX_FILE_LINES}"
    for name, line, length in functions(source):
        if length > MAX_FUNCTION_LINES and name not in EMITTERS:
            yield f"{source.module}:{line}: {name} has {length} lines, at most {MAX_FUNCTION_LINES}"


def undocumented(source):
    def visit(node, name):
        if ast.get_docstring(node) is None:
            yield f"{name}: no docstring"
        for child in node.body:
            if isinstance(child, ast.ClassDef) and not child.name.startswith("_"):
                yield from visit(child, f"{name}.{child.name}")
            elif (
                isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
                and not child.name.startswith("_")
                and ast.get_docstring(child) is None
            ):
                yield f"{name}.{child.name}: no docstring"

    yield from visit(source.tree, source.module)


def unreasoned(source):
    """Silenced checkers: `# type: ignore[code]  # reason`, `# noqa: CODE - reason`."""
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type != tokenize.COMMENT:
            continue
        comment = token.string
        silent = re.search(r"type:\s*ignore", comment) and not re.search(
            r"type: ignore\[[\w, -]+\]\s*# \S.+", comment
        )
        loud = re.search(r"noqa", comment) and not re.search(
            r"noqa: [A-Z]+\d+(, ?[A-Z]+\d+)* - \S.+", comment
        )
        if silent or loud:
            yield f"{source.module}:{token.start[0]}: {comment} gives no code or no reason"


def public_functions(source):
    """The public functions and methods, by their names with those of their classes."""

    def visit(node, name):
        for child in node.body:
            if isinstance(child, ast.ClassDef | ast.FunctionDef) and not child.name.startswith("_"):
                if isinstance(child, ast.FunctionDef):
                    yield f"{name}.{child.name}", child
                else:
                    yield from visit(child, f"{name}.{child.name}")

    yield from visit(source.tree, source.module)


def is_public(source):
    """Whether users import from this module: the names of `dpdask`, opened releases, `inference`, `local`."""
    # of which users import one name
    inside = {"engine.account", "evaluation.measures", "mechanisms.copula.fit", "stats.ranges"}
    inside |= {"inference.pseudo_values", "inference.tallies"}
    named = {*dpdask._MODULES, *inference._MODULES, "analysis.opening", "inference.m_estimators"}
    return source.module in named - inside or source.room == "local"


def undocumented_parameters(source):
    """Of what users import: two or more parameters stand in a section of their own, or the docstring refers to `see other`."""
    if not is_public(source):
        return
    for name, node in public_functions(source):
        given = [
            each.arg
            for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
            if each.arg not in ("self", "cls")
        ]
        command = any(
            re.search(r"\.(command|group)\b", ast.unparse(decorator))
            for decorator in node.decorator_list
        )
        documented = re.search(
            r"^Parameters\n-|\b(?:[Ss]ee|[Aa]s for) `", ast.get_docstring(node) or "", re.MULTILINE
        )
        if len(given) >= 2 and not command and not documented:
            yield f"{name}:{node.lineno}: its parameters are not documented"


def participles(source):
    """Functions are verbs: `compose`, not `composed`. Properties are not functions here; `split_epsilon` and `is_released` are verbs."""
    for name, node in public_functions(source):
        is_property = any("property" in ast.unparse(decorator) for decorator in node.decorator_list)
        if not is_property and PARTICIPLE.fullmatch(node.name):
            yield f"{name}:{node.lineno}: a function is a verb, not a participle"


def asked_kinds(source):
    """A mechanism brings its words: outside `mechanisms`, nothing compares a kind with that of a mechanism."""
    if source.room == "mechanisms":
        return
    for node in ast.walk(source.tree):
        sides = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
        named = {
            each.value
            for side in sides
            for each in ast.walk(side)
            if isinstance(each, ast.Constant)
        }
        if named & MECHANISMS or ("histogram" in named and "mechanism" in ast.unparse(node)):
            yield f"{source.module}:{node.lineno}: {ast.unparse(node)}; ask the mechanism's guidance"


def read_texts(source):
    """Text is output: only the JSON Schemas are made from docstrings."""
    for node in ast.walk(source.tree):
        name = (
            _dotted(node).rpartition(".")[2] if isinstance(node, ast.Name | ast.Attribute) else ""
        )
        if name in ("__doc__", "getdoc", "getsource", "cleandoc") and source.room != "schemas":
            yield f"{source.module}:{node.lineno}: {name} is text for people"


RULES = [
    wrong_arrows,
    stray_dask,
    stray_randomness,
    banned_calls,
    too_long,
    undocumented,
    undocumented_parameters,
    participles,
    unreasoned,
    asked_kinds,
    read_texts,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_package_keeps_the_rule(rule):
    assert [violation for source in sources() for violation in rule(source)] == []


def test_lines_fit_on_a_screen():
    widths = sorted(
        len(line) for source in sources() for line in source.text.splitlines() if line.strip()
    )
    assert widths[int(0.95 * len(widths))] <= MAX_COLUMNS


def test_functions_are_short():
    lengths = sorted(length for source in sources() for _, _, length in functions(source))
    assert lengths[int(0.9 * len(lengths))] <= P90_FUNCTION_LINES


def test_the_package_is_there():
    rooms = {source.room for source in sources()}
    assert {"kernels", "engine", "io", "jobs", "cli"} <= rooms


def test_the_picture_of_the_rooms_is_drawn_from_the_code():
    drawer = runpy.run_path(str(PACKAGE.parent / "docs" / "site" / "rooms.py"))
    assert drawer["PICTURE"].read_text(encoding="utf-8") == drawer["draw"](), (
        "python docs/site/rooms.py"
    )


def test_the_arrows_have_no_cycle():
    def reach(room, seen):
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
    (wrong_arrows, "mechanisms.card", "from dpdask.evaluation.measures import exact_marginals"),
    (wrong_arrows, "evaluation.tables", "from dpdask.jobs.run import run_job"),
    (wrong_arrows, "engine.x", "from dpdask.evaluation.measures import exact_marginals"),
    (wrong_arrows, "archive", "from dpdask.schema import Schema"),
    (wrong_arrows, "estimators.dip", "from dpdask.jobs.spec import Job"),
    (wrong_arrows, "estimators.dip", "from dpdask.evaluation.measures import exact_marginals"),
    (wrong_arrows, "engine.x", "from dpdask.jobs.spec import Job"),
    (wrong_arrows, "engine.x", "from dpdask.inference import debias"),
    (wrong_arrows, "engine.x", "from dpdask.estimators.families import DIP"),
    (wrong_arrows, "jobs.x", "from dpdask.estimators.families import DIP"),
    (wrong_arrows, "mechanisms.x", "from dpdask.estimators.release import Release"),
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
    (stray_randomness, "mechanisms.x", "from dpdask.streams import Stream\nrng = Stream(key)"),
    (stray_randomness, "mechanisms.dip.x", "rng = stream(key, name, place).seed_generator()"),
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
    (undocumented_parameters, "inference.debias", 'def f(a, b):\n    """Doc."""'),
    (
        undocumented_parameters,
        "inference.debias",
        'class C:\n    def f(self, a, *, b=1):\n        """Return the Parameters."""',
    ),
    (participles, "io.x", "def composed(): ..."),
    (participles, "io.x", "class C:\n    def kept_rows(self): ..."),
    (asked_kinds, "page.x", "if card.mechanism.kind == 'dip': pass"),
    (asked_kinds, "page.x", "x = card['mechanism']['kind'] in ('histogram', 'rows')"),
    (read_texts, "jobs.x", "x = inspect.getdoc(y)"),
    (read_texts, "jobs.x", "x = y.__doc__"),
    (unreasoned, "x", "x = 1  # type: ignore"),
    (unreasoned, "x", "x = 1  # type: ignore[arg-type]"),
    (unreasoned, "x", "x = 1  # noqa"),
    (unreasoned, "x", "x = 1  # noqa: S506"),
    (unreasoned, "x", "x = 1  # noqa: S506 -"),
]

GOOD = [
    (
        wrong_arrows,
        "kernels.x",
        "from dpdask.kernels import channel\nfrom .jit import jit\nimport numpy",
    ),
    (wrong_arrows, "cli", "from dpdask import jobs\nfrom dpdask.connect import open_cluster"),
    (
        wrong_arrows,
        "estimators.dip",
        "from dpdask.mechanisms.dip.chain import RecordsMechanism\nfrom dpdask.engine import fit",
    ),
    (
        wrong_arrows,
        "evaluation.tables",
        "from dpdask.engine.scan import scan\nfrom dpdask.estimators.frames import declare_counted",
    ),
    (wrong_arrows, "schema", "from dpdask.archive import Archive"),
    (wrong_arrows, "io.x", "from dpdask.errors import DataError\nfrom dpdask.schema import Schema"),
    (stray_dask, "engine.x", "import dask"),
    (
        stray_randomness,
        "stats.x",
        "from numpy.random import Generator\ndef f(rng: Generator) -> Generator: ...",
    ),
    (stray_randomness, "stats.x", "import numpy as np\ndef f(rng: np.random.Generator): ..."),
    (
        stray_randomness,
        "simulate",
        "from numpy.random import PCG64, Generator, SeedSequence\nrng = Generator(PCG64(SeedSequence(1)))",
    ),
    (stray_randomness, "streams", "import secrets\nfrom numpy.random import PCG64"),
    (stray_randomness, "analysis.x", "rng = stream(key, name, place).seed_generator()"),
    (banned_calls, "engine.x", "import dask\ndask.compute(x)"),
    (banned_calls, "codec", "import pyarrow.compute as pc\npc.index_in(x)"),
    (banned_calls, "mechanisms.x", "np.load(f, allow_pickle=False)"),
    (too_long, "x", 'def f():\n    """' + "long\n" * MAX_FUNCTION_LINES + '    """\n    return 1'),
    (
        undocumented,
        "x",
        '"""Doc."""\ndef _f(): ...\nclass _C:\n    def f(self): ...\nclass D:\n    """Doc."""\n    def __repr__(self): ...',
    ),
    (
        undocumented_parameters,
        "inference.debias",
        'def f(a, b):\n    """Doc.\n\n    Parameters\n    ----------\n    a, b\n        x.\n    """',
    ),
    (
        undocumented_parameters,
        "inference.debias",
        'def f(a, b):\n    """Doc; see `g`."""\nclass C:\n    def one(self, a): ...\n    def _private(self, a, b): ...',
    ),
    (undocumented_parameters, "io.x", 'def f(a, b):\n    """Doc: inside, one line."""'),
    (undocumented_parameters, "inference.x", 'def f(a, b):\n    """Doc: inside, one line."""'),
    (undocumented_parameters, "cli", "@group.command(name='run')\ndef run(a, b): ..."),
    (
        participles,
        "io.x",
        "class C:\n    @property\n    def composed(self): ...\n    def _kept(self): ...\ndef seed_streams(): ...\ndef is_kept(): ...",
    ),
    (
        unreasoned,
        "x",
        "x = 1  # type: ignore[arg-type]  # pyarrow is untyped\ny = 2  # noqa: S506 - a SafeLoader",
    ),
    (asked_kinds, "analysis.x", "x = reference.kind == 'histogram'"),
    (read_texts, "schemas.x", "x = inspect.getdoc(y)"),
    (unreasoned, "x", 's = "# noqa"'),
]


@pytest.mark.parametrize(
    ("rule", "module", "text"), BAD, ids=lambda value: getattr(value, "__name__", None)
)
def test_a_rule_can_fail(rule, module, text):
    assert list(rule(Source(module, text)))


@pytest.mark.parametrize(
    ("rule", "module", "text"), GOOD, ids=lambda value: getattr(value, "__name__", None)
)
def test_a_rule_lets_good_sources_pass(rule, module, text):
    assert list(rule(Source(module, text))) == []


def module_graph():
    """Which module imports which, by their places below the package."""
    known = {source.module.removesuffix(".__init__"): source for source in sources()}
    graph = {}
    for module, source in known.items():
        named = {
            name.removeprefix("dpdask.")
            for name, _ in imports(source)
            if name.startswith("dpdask.")
        }
        graph[module] = {other for other in named if other in known} - {module}
    return graph


def cycles(graph):
    """Modules that import each other, directly or not."""
    reached = {}
    for start in graph:
        seen, todo = set(), [start]
        while todo:
            for other in graph.get(todo.pop(), set()) - seen:
                seen.add(other)
                todo.append(other)
        reached[start] = seen
    return [
        [module, other]
        for module in graph
        for other in sorted(reached[module])
        if module < other and module in reached.get(other, set())
    ]


def test_no_modules_import_each_other():
    packages = {
        source.module.removesuffix(".__init__")
        for source in sources()
        if source.module.endswith("__init__")
    }
    assert (
        cycles(
            {
                module: others - packages
                for module, others in module_graph().items()
                if module not in packages
            }
        )
        == []
    )


def test_a_cycle_is_found():
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [
        ["a", "b"],
        ["a", "c"],
        ["b", "c"],
    ]


def test_the_engine_has_few_arrows():
    graph = module_graph()
    arrows = [
        (module, other)
        for module in graph
        for other in graph[module]
        if module.startswith("engine.") and other.startswith("engine.")
    ]
    assert len(arrows) <= MAX_ENGINE_ARROWS


def test_each_mechanism_is_one_small_folder():
    for folder in (PACKAGE / "mechanisms").iterdir():
        assert not folder.is_dir() or len(list(folder.glob("*.py"))) <= MAX_MECHANISM_FILES


def test_references_answer_for_themselves():
    asked = re.compile(r"isinstance\([^)]*\b(Chain|Tree|Known|Holdout|Public|Histogram)\b")
    assert [
        source.module
        for source in sources()
        if source.room != "references" and asked.search(source.text)
    ] == []


def test_no_public_class_name_means_two_things():
    named = {}
    for source in sources():
        for node in source.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                named.setdefault(node.name, []).append(source.module)
    assert {name: modules for name, modules in named.items() if len(modules) > 1} == {}


FIXTURE = re.compile(r"^@pytest\.fixture\b[^\n]*\ndef (\w+)", re.MULTILINE)
OF_A_CONFTEST = re.compile(r"^\s*(?:from|import) (?:\w+\.)*conftest\b", re.MULTILINE)


def hidden_fixtures(texts):
    """Return the fixtures of helpers that the conftest of all tests hides: those that no nearer conftest names."""
    ours = set(FIXTURE.findall(texts[Path("conftest.py")]))
    return {
        (str(path), name)
        for path, text in texts.items()
        if not path.name.startswith(("test_", "conftest"))
        for name in ours.intersection(FIXTURE.findall(text))
        if not re.search(rf"\b{name}\b", texts.get(path.with_name("conftest.py"), ""))
    }


def test_no_file_and_no_fixture_of_tests_hides_another():
    """Of two modules of one name in two folders, pytest imports the first: neither has a double, and no `conftest` is imported."""
    tests = Path(__file__).parent
    texts = {path.relative_to(tests): path.read_text() for path in tests.rglob("*.py")}
    names = Counter(path.name for path in texts if path.name.startswith("test_"))
    assert [name for name, n in names.items() if n > 1] == []
    assert hidden_fixtures(texts) == set()
    assert [str(path) for path, text in texts.items() if OF_A_CONFTEST.search(text)] == []
    del texts[Path("privacy/conftest.py")]
    assert hidden_fixtures(texts) == {("privacy/ledger_worker.py", "url")}
    assert OF_A_CONFTEST.search("import re\n\nfrom privacy.conftest import url\n")
