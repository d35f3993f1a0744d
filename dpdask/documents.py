"""YAML documents that users write: read strictly, validated by pydantic, refused in one line."""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
)

from dpdask.errors import CombinedSpecError, OutputError, SpecError


def list_known_keys(model: type[BaseModel], path: Sequence[str], data: Any) -> list[str]:
    """Return the keys that are known at a path inside a model.

    Names in a mapping and positions in a list lead no deeper. Where models of several kinds may
    stand, the one whose kind the data names is meant.
    """
    models = _find_models(model, path, data)
    return [field.alias or name for each in models for name, field in each.model_fields.items()]


def list_required_keys(model: type[BaseModel], path: Sequence[str], data: Any) -> list[str]:
    """Return the required keys of the mapping that may stand at a path; none if no mapping may."""
    *parent, last = path or ("",)
    models = _find_models(model, parent, data)
    fields = [each.model_fields[last] for each in models if last in each.model_fields]
    if fields:  # else a name in a mapping
        models = [inner for field in fields for inner in models_in(field.annotation)]
    found = models[0].model_fields if models else {}
    return [
        field.alias or name
        for name, field in found.items()
        if field.is_required() or name == "kind"
    ]


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """Return the models that a field's type names."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in getattr(annotation, "__args__", ()) for model in models_in(part)]


def _find_models(model: type[BaseModel], path: Sequence[str], data: Any) -> list[type[BaseModel]]:
    """Return the models that may stand at a path inside a model."""
    models = [model]
    for key in path:
        if isinstance(data, list | tuple):
            data = data[int(key)]
        else:
            data = next(value for name, value in data.items() if str(name) == key)
        fields = [each.model_fields[key] for each in models if key in each.model_fields]
        models = [inner for field in fields for inner in models_in(field.annotation)] or models
        given = [data.get("kind"), data.get("design")] if isinstance(data, Mapping) else []
        tags = {tag for tag in given if isinstance(tag, str)}  # a column may have the name "kind"
        models = [each for each in models if tags & _list_tags(each)] or models
    return models


def _list_tags(model: type[BaseModel]) -> set[Any]:
    """Return the kinds of a model."""
    fields = [model.model_fields.get(tag) for tag in ("kind", "design")]
    return {tag for field in fields for tag in getattr(field and field.annotation, "__args__", ())}


Model = TypeVar("Model", bound=BaseModel)

_LONGEST_SHOWN = 60
_DEEPEST = 100  # levels of lists and mappings
_NEAR = 0.7  # how alike a name must be to be proposed
_NEAR_KEY = 0.6  # a key, of which fewer are possible
_OTHERS_WORDS = {  # of keys that people call otherwise
    "bins": {"cells", "cuts", "edges"},
    "bounds": {"high", "low", "lower", "max", "min", "range", "upper"},
    "cliques": {"marginals", "queries", "tables"},
    "levels": {"categories", "values"},
    "url": {"database", "file", "path", "uri"},
}
_TAG = "tag:yaml.org,2002:"
# also 1_000_000
_DECIMAL = re.compile(
    r"[-+]?(0|[1-9]\d*|[1-9]\d{0,2}(_\d{3})+)?(\.\d*)?(e[-+]?\d+)?", re.IGNORECASE
)
_ODD_TEXT = re.compile(r"[-+]?0(\d[\d_]*(\.\d*)?|o[0-7_]+)")  # a number to people, a text to YAML
_EXPECTED = {  # pydantic's types of errors, in the words of a YAML document
    "bool_type": "true or false is expected",
    "dict_type": "a mapping is expected",
    "finite_number": "a finite number is expected",
    "float_type": "a number is expected",
    "greater_than": "a number above {gt:g} is expected",
    "greater_than_equal": "at least {ge:g} is expected",
    "int_from_float": "a whole number is expected",
    "int_type": "a whole number is expected",
    "less_than": "a number below {lt:g} is expected",
    "less_than_equal": "at most {le:g} is expected",
    "list_type": "a list is expected",
    "literal_error": "{expected} is expected",
    "model_attributes_type": "a mapping is expected",
    "model_type": "a mapping is expected",
    "string_type": "a text is expected",
    "tuple_type": "a list is expected",
}


if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass
else:
    ModelMetaclass = type(BaseModel)  # it has no public name


class _PlainErrors(ModelMetaclass):
    """Raises a line for each wrong argument of a class, as for a wrong file, in place of pydantic's own errors."""

    def __call__(self, *args: Any, **given: Any) -> Any:
        try:
            return super().__call__(*args, **given)
        except ValidationError as error:
            raise join_errors(
                _list_problems(error, cast("type[BaseModel]", self), given, Text(self.__name__))
            ) from None


class Document(BaseModel, metaclass=_PlainErrors):
    """The base of documents that users write: immutable, and without unknown keys."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, arbitrary_types_allowed=False
    )


class GrownDocument(Document):
    """A document that had fewer keys once: those that came later are written where they are not the default, so digests stay as they were."""

    later: ClassVar[frozenset[str]]

    @model_serializer(mode="wrap")
    def _without_usual(self, plain: SerializerFunctionWrapHandler) -> dict[str, Any]:
        written: dict[str, Any] = plain(self)
        fields = type(self).model_fields
        return {
            key: value
            for key, value in written.items()
            if key not in self.later or value != fields[key].default
        }


_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the one in C, where it was built


class _StrictLoader(_Loader):  # type: ignore[misc]  # one of two
    """A safe loader that reads `1e-5` as a number, and refuses what YAML takes in silence.

    That is a key given twice, and a value that is not as it looks.
    """

    def get_single_node(self) -> Any:
        root = super().get_single_node()
        reader = _StrictLoader("")  # it reads values before merge keys are expanded
        for node in _check_keys(root):
            reader.check_look(node)
        return root

    def check_look(self, node: yaml.Node) -> None:
        """Refuse a value that YAML reads as another than a person does: 0100 as 64, 1:30 as 90, no as false, and 08, beside 7, as a text."""
        text = _TAG + "str"
        if isinstance(node, yaml.SequenceNode) and {inner.tag for inner in node.value} - {text}:
            for inner in node.value:
                if inner.tag == text and not inner.style and _ODD_TEXT.fullmatch(inner.value):
                    zero = ", or write the number without the leading zero"
                    raise _describe_look(inner, "a text", "" if "o" in inner.value else zero)
        if not isinstance(node, yaml.ScalarNode):
            return
        if node.tag in (_TAG + "merge", _TAG + "value"):  # << and = are no values
            raise _describe_look(node, "a sign of its own", "")
        try:
            read = self.construct_object(node)
        except (ValueError, yaml.YAMLError):  # told with its place when the document is built
            return
        if not _looks_like(read, node.value):
            raise _describe_look(node, _write_plain(read), f", or write {_write_plain(read)}")


def _describe_look(node: yaml.ScalarNode, read: str, otherwise: str) -> SpecError:
    shown = node.value if _may_show(node.value) else "this value"
    where = f"line {node.start_mark.line + 1}"
    return SpecError(f"YAML reads {shown} as {read}", where, f"put it in quotes{otherwise}")


def _write_plain(value: Any) -> str:
    """Return a value as YAML shows it."""
    if isinstance(value, date):
        return value.isoformat()
    return str(value).lower().replace("inf", ".inf")


def _looks_like(value: Any, text: str) -> bool:
    """Return whether a value is what its text says to anybody: a decimal number, true, false, a date or time, or no such thing."""
    if isinstance(value, bool):
        return text.lower() == _write_plain(value)
    if isinstance(value, int | float):
        if not math.isfinite(value):
            return text.lower().lstrip("-+") in (".inf", ".nan")
        return bool(_DECIMAL.fullmatch(text)) and Decimal(text) == Decimal(repr(value))
    if isinstance(value, date):
        try:
            is_whole = not re.search(r"\.\d{7}", text)  # more digits are cut off
            return is_whole and type(value).fromisoformat(text) == value
        except ValueError:
            return False
    return True


def _check_depth(text: str) -> None:
    """Check that a YAML document is not nested deeply, and no value in itself.

    The loader in C recurses as deeply, and would end the process.
    """
    around: list[str | None] = []  # the anchors of the values that are open
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.CollectionStartEvent):
            around.append(event.anchor)
        elif isinstance(event, yaml.CollectionEndEvent):
            around.pop()
        elif isinstance(event, yaml.AliasEvent) and event.anchor in around:
            raise SpecError("a value contains itself", None, f"remove the alias *{event.anchor}")
        if len(around) > _DEEPEST:
            hint = "remove some of the brackets or indents"
            raise SpecError("the values are nested too deeply", None, hint)


def _check_keys(root: Any) -> Iterator[yaml.Node]:
    """Check the keys of all mappings of a YAML document, before merge keys are expanded: merged keys may be overridden. Yield each value."""
    waiting, done = [root], set[int]()
    while waiting:
        node = waiting.pop()
        if id(node) in done or node is None:
            continue
        done.add(id(node))
        yield node
        if isinstance(node, yaml.ScalarNode):
            continue
        seen: set[str] = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            line = f"line {key.start_mark.line + 1}"
            # 1, no, 2020-01-01 and [a] are no names
            if key.tag not in (_TAG + "str", _TAG + "merge"):
                raise SpecError("a key is not a text", line, "put it in quotes")
            if key.value in seen:
                raise SpecError(f"the key {key.value!r} is repeated", line, "remove one of the two")
            seen.add(key.value)
        is_mapping = isinstance(node, yaml.MappingNode)
        waiting += reversed([value for _, value in node.value] if is_mapping else node.value)


_StrictLoader.add_implicit_resolver(
    _TAG + "float",
    re.compile(r"[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


def parse_yaml(text: str, where: str) -> dict[str, Any]:
    """Return the mapping that a YAML text holds."""
    data = parse_value(text, where)
    if not isinstance(data, dict):
        hint = "begin with `key: value` lines"
        raise SpecError("a mapping of names to values is expected", where, hint)
    return data


def parse_value(text: str, where: str) -> Any:
    """Return the value that a YAML text holds.

    For the parameters see `parse_yaml`.
    """
    try:
        _check_depth(text)
        return _StrictLoader(text).get_single_data()
    except yaml.YAMLError as error:
        raise _describe_invalid(error, text, where) from None
    except ValueError:  # raised for 2020-02-30
        reader, place = _StrictLoader(""), where
        for line, keys, node in _walk(_StrictLoader(text).get_single_node()):
            try:
                reader.construct_object(node) if isinstance(node, yaml.ScalarNode) else None
            except ValueError:
                at = f"line {line}" if "\n" in text.strip() else ""
                place = ", ".join(filter(None, (where, at, ".".join(keys))))
                break
        hint = "correct a date that does not exist, or a number that is too long"
        raise SpecError("a value cannot be read", place, hint) from None
    except SpecError as error:
        raise error.at(where) from None


def _describe_invalid(error: yaml.YAMLError, text: str, where: str) -> SpecError:
    """Return the problem of a text that is not YAML: its lines, and what often is the cause."""
    marks = [getattr(error, name, None) for name in ("context_mark", "problem_mark")]
    lines = sorted({mark.line for mark in marks if mark is not None})
    if lines:
        where += f", line{'s' * (len(lines) > 1)} {' to '.join(str(at + 1) for at in lines)}"
    rows, hint = text.splitlines(), "correct its indentation or quoting"
    if any(
        "\t" in row[: len(row) - len(row.lstrip())] for at in lines for row in rows[at : at + 1]
    ):
        hint = "indent with blanks, not with a tab"
    elif "flow" in str(getattr(error, "context", "")):
        hint = "close the bracket, or write the missing comma"
    return SpecError("this is not valid YAML", where, hint)


@dataclass(frozen=True, slots=True)
class Text:
    """The text of a document, which tells messages the line of a key."""

    name: str
    content: str = ""  # the YAML text; empty if the document was not written as one
    settings: Collection[str] = ()  # the dotted keys that were changed outside the text, by `--set`
    folder: str = ""  # where it lies; files that it names lie there too

    def locate(self, keys: Sequence[str]) -> str:
        """Return where a value stands: the document, the line, and the dotted key."""
        return ", ".join(filter(None, (self.find_line(keys), ".".join(keys))))

    def find_line(self, keys: Sequence[str]) -> str:
        """Return the document and the line of a key, or of what should hold it; the setting, if one put it there."""
        path = ".".join(keys)
        if any(f"{path}.".startswith(f"{key}.") for key in self.settings):
            return f"{self.name}, --set"
        line = self._find_line(keys)
        return f"{self.name}, line {line}" if line else self.name

    def _find_line(self, keys: Sequence[str]) -> int:
        node = _StrictLoader(self.content).get_single_node() if self.content and keys else None
        line = 0
        for key in keys:
            found = [(at, inner) for at, name, inner in _children(node) if name == key]
            if not found:  # missing, or merged from elsewhere
                break
            line, node = found[0]
        return line

    def list_todos(self) -> list[SpecError]:
        """Return an error for each mapping, such as a column, with values that are still TODO.

        `dpdask init` leaves what only people know. A TODO in quotes is a text.
        """
        if "TODO" not in self.content:
            return []
        found: dict[tuple[str, ...], list[str]] = {}
        for _, keys, node in _walk(_StrictLoader(self.content).get_single_node()):
            if isinstance(node, yaml.ScalarNode) and node.value == "TODO" and not node.style:
                found.setdefault(keys[:-1], []).append(keys[-1])
        errors = []
        for parent, (*most, last) in found.items():
            several = f"{', '.join(most)} and {last} are still TODO"
            where = self.locate(parent if most else (*parent, last))
            hint = f"replace TODO by a value, or remove the key{'s' if most else ''}"
            errors.append(SpecError(several if most else "this is still TODO", where, hint))
        return errors


def read_text(path: str | Path, what: str, hint: str) -> Text:
    """Return the text of a file."""
    no_text = SpecError(f"{what}, since it is not a YAML text in UTF-8", str(path), hint)
    try:
        content = Path(path).read_text(encoding="utf-8")
    except OSError:
        raise SpecError(what, str(path), hint) from None
    except UnicodeDecodeError:
        raise no_text from None
    if "\0" in content:
        raise no_text
    return Text(Path(path).name, content, folder=str(Path(path).parent))


def write_new(files: Mapping[str, str | bytes]) -> None:
    """Write new files, by their paths; none if one is there already."""
    for path in filter(os.path.lexists, files):
        hint = "choose another name: an existing file is never overwritten"
        raise OutputError("this file is there already", path, hint)
    for path, content in files.items():
        try:
            with Path(path).open("xb") as file:
                file.write(content.encode() if isinstance(content, str) else content)
        except OSError as error:
            what = f"the file cannot be written ({type(error).__name__})"
            raise OutputError(what, path, "choose another place") from None


def _children(node: yaml.Node | None) -> Iterator[tuple[int, str, yaml.Node]]:
    """Yield the line, the key or position, and the node of each value in a mapping or a list."""
    if isinstance(node, yaml.MappingNode):
        yield from ((key.start_mark.line + 1, key.value, value) for key, value in node.value)
    elif isinstance(node, yaml.SequenceNode):
        yield from (
            (value.start_mark.line + 1, str(number), value)
            for number, value in enumerate(node.value)
        )


def _walk(
    node: yaml.Node | None, keys: tuple[str, ...] = (), line: int = 1
) -> Iterator[tuple[int, tuple[str, ...], yaml.Node | None]]:
    """Yield the line, the keys and the node of a value and of all that are in it."""
    yield line, keys, node
    for at, key, inner in _children(node):
        yield from _walk(inner, (*keys, key), at)


def validate(model: type[Model], data: Mapping[str, Any], where: str | Text) -> Model:
    """Return `data` as a `model`."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        text = Text(where) if isinstance(where, str) else where
        raise join_errors(_list_problems(error, model, data, text)) from None


def join_errors(errors: Sequence[SpecError]) -> SpecError:
    """Return one error that says all of them, at least one."""
    problems = [
        problem
        for error in errors
        for problem in (error.problems if isinstance(error, CombinedSpecError) else (error,))
    ]
    return problems[0] if len(problems) == 1 else CombinedSpecError(problems)


def check_all(*checks: Callable[[], Any]) -> list[Any]:
    """Return what each check returns; raise the errors of all that fail together."""
    found, errors = [], []
    for check in checks:
        try:
            found.append(check())
        except SpecError as error:
            errors.append(error)
    if errors:
        raise join_errors(errors) from None
    return found


def suggest(name: object, known: Iterable[str], otherwise: str) -> str:
    """Return a hint: the known name that is nearest to a wrong one, if one is near."""
    near = find_near(name, known)
    return otherwise if near is None else f"did you mean {near!r}?"


def find_near(name: object, known: Iterable[str]) -> str | None:
    """Return the known name that is nearest to a wrong one; None if none is near."""
    return next(iter(difflib.get_close_matches(str(name), list(known), n=1, cutoff=_NEAR)), None)


def _list_problems(
    error: ValidationError, model: type[BaseModel], data: Mapping[str, Any], text: Text
) -> list[SpecError]:
    """Return a problem for each place of a document that is wrong, in the order of the issues."""
    problems: dict[tuple[str, ...], SpecError] = {}
    # missing keys that stand there under a name that is nearly theirs
    answered: set[tuple[str, ...]] = set()
    for issue in _without_other_members(error.errors(include_url=False), data):
        keys, kind, where = _place(issue["loc"], data), issue["type"], None
        if kind in ("missing", "union_tag_not_found"):
            last = issue["loc"][-1] if kind == "missing" else issue["ctx"]["discriminator"]
            missing = (*keys, str(last).strip("'"))
            where = text.find_line(keys)
            lacking = SpecError(f"the key {'.'.join(missing)!r} is missing", where, "add it")
            problems.setdefault(missing, lacking)
        elif kind == "extra_forbidden":
            # that of another kind may have the name
            known = [each for each in list_known_keys(model, keys[:-1], data) if each != keys[-1]]
            meant = [key for key in known if keys[-1].lower() in _OTHERS_WORDS.get(key, ())]
            near = meant or difflib.get_close_matches(keys[-1], known, n=1, cutoff=_NEAR_KEY)
            answered.update((*keys[:-1], name) for name in near)
            hint = f"the keys here are {', '.join(dict.fromkeys(known))}" if known else None
            hint = f"did you mean {near[0]!r}?" if near else hint
            shown = f" {'.'.join(keys)!r}" if all(map(_may_show, keys)) else ""
            unknown = SpecError(f"unknown key{shown}", text.find_line(keys), hint)
            problems[tuple(keys)] = unknown
        else:
            wrong = _describe_wrong(issue, keys, text, list_required_keys(model, keys, data))
            problems.setdefault(tuple(keys), wrong)
    return [problem for place, problem in problems.items() if place not in answered]


def _describe_wrong(
    issue: Any, keys: Sequence[str], text: Text, inside: Sequence[str]
) -> SpecError:
    """Return the problem of a value that is there, and wrong; `inside` are the keys of the mapping that may stand there."""
    context, given = issue.get("ctx", {}), issue["input"]
    if issue["type"] == "union_tag_invalid":
        key = context["discriminator"].strip("'")
        kinds = re.findall(r"'([^']*)'", context["expected_tags"])
        hint = suggest(context["tag"].lower(), kinds, f"take one of {', '.join(kinds)}")
        shown = f"{key} {context['tag']!r}" if _may_show(context["tag"]) else f"such {key}"
        return SpecError(f"there is no {shown} here", text.locate([*keys, key]), hint)
    message = issue["msg"].removeprefix("Value error, ")
    if issue["type"] in _EXPECTED:
        message = _EXPECTED[issue["type"]].format(**context)
    what, semicolon, mend = message.partition("; ")
    shown = str(given).lower() if isinstance(given, bool) else repr(given)
    if isinstance(given, bool | int | float | str) and _may_show(shown) and shown not in message:
        what = f"{what}, not {shown}"
    return SpecError(f"{what}{semicolon}{mend}", text.locate(keys), _mend_type(issue, keys, inside))


def _may_show(text: str) -> bool:
    """Return whether a value is short, and holds no password as URLs and connection strings do."""
    return len(text) <= _LONGEST_SHOWN and not {"@", "="} & set(text)


def _mend_type(issue: Any, keys: Sequence[str], inside: Sequence[str]) -> str | None:
    """Return how a value of the wrong type is written, where that can be told."""
    kind, given = issue["type"], issue["input"]
    if isinstance(given, str):
        if kind in ("literal_error", "model_type", "model_attributes_type", "dict_type"):
            if "{" in str(keys[-1:]):
                return "write a blank after the colon"
            choices = re.findall(r"'([^']*)'", issue.get("ctx", {}).get("expected", ""))
            more = ", …" if len(inside) > 1 else ""
            fits = inside and _may_show(given) and (inside[0] != "kind" or given.isidentifier())
            written = f"write {{{inside[0]}: {given}{more}}}" if fits else None
            return suggest(given, choices, "") or written
        is_number = re.fullmatch(r"[-+.\d]+(e[-+]?\d+)?", given, re.IGNORECASE)
        if kind in ("float_type", "int_type") and is_number:
            return "write it without quotes"
    quotable = kind == "string_type" and isinstance(given, bool | int | float | date)
    return "put it in quotes" if quotable else None


def _without_other_members(issues: Sequence[Any], data: Any) -> list[Any]:
    """Return the issues of the intended type where a value may have several: the one whose issue lies deepest inside the document."""
    chosen: dict[tuple[str, ...], tuple[int, Any]] = {}
    for issue in issues:
        depth = len(_place(issue["loc"], data)) + (issue["type"] == "missing")
        for place, member in _members(issue, data):
            if place not in chosen or depth > chosen[place][0]:
                chosen[place] = (depth, member)
    return [
        issue
        for issue in issues
        if all(chosen[place][1] == member for place, member in _members(issue, data))
    ]


def _members(issue: Any, data: Any) -> Iterator[tuple[tuple[str, ...], str | int]]:
    """Yield the parts of an issue's location that are no keys, but name a type that was tried, each with its place in the document."""
    location = issue["loc"][:-1] if issue["type"] == "missing" else issue["loc"]
    places = [tuple(_place(location[:end], data)) for end in range(len(location) + 1)]
    yield from (
        (place, part)
        for part, place, following in zip(location, places, places[1:], strict=False)
        if place == following
    )


def _place(location: Sequence[str | int], data: Any) -> list[str]:
    """Return the keys and positions that lead to an issue, without the names of validators and union members that pydantic puts between."""
    keys: list[str] = []
    tagged = False
    for part in location:
        # `address` may be the kind of a cluster and one of its keys: the kind comes first
        if isinstance(data, Mapping):
            if not tagged and part in (data.get("kind"), data.get("design")):
                tagged = True
                continue
            inside = part in data
        else:
            inside = isinstance(data, list | tuple) and part in range(len(data))
        if inside:
            keys.append(str(part))
            data, tagged = data[part], False
    return keys
