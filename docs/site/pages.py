"""What MkDocs is told beside the pages of docs/: the pages elsewhere in the repository, the generated references, the notebooks."""

from __future__ import annotations

import base64
import json
import posixpath
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))  # MkDocs is a program of its own
SHOWN = (
    "README.md",
    "SECURITY.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "CODE_OF_CONDUCT.md",
    "CITATION.cff",
    "LICENSE",
    "NOTICE",
    "pyproject.toml",
    "constraints.txt",
)
FOLDERS = ("cluster", "pipelines")
_RENAMED = {
    "README.md": "readme.md",
    "docs/README.md": "pages.md",
}  # MkDocs takes a README for the index of its folder
PAGES = "gallery/"  # of releases, that the build makes
CELL = re.compile(
    r"^```(python|bash|yaml|text)\n(.*?)^```\n|^!\[([^]\n]*)\]\((\w+\.png)\)\n",
    re.DOTALL | re.MULTILINE,
)
LINK = re.compile(r"(\]\()(?!\w+:)([^)#\s]+)((?:#[^)\s]*)?\))")


def place_in_site(path: str) -> str:
    """The place of a file of the repository in the site: docs/ and the README come first, the rest keeps its path."""
    return _RENAMED.get(path) or path.removeprefix("docs/")


def place_in_repository(uri: str) -> str:
    for path, place in _RENAMED.items():
        if uri == place:
            return path
    return uri if uri.partition("/")[0] in (*FOLDERS, *SHOWN) else f"docs/{uri}"


def with_links(text: str, uri: str) -> str:
    """A page's text with its links between files of the repository turned into links between places of the site."""
    folder = posixpath.dirname(place_in_repository(uri))

    def follow(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, link[2]))
        target = f"{target}/README.md" if (ROOT / target).is_dir() else target
        if not (ROOT / target).is_file():  # a folder without a page
            return link[1] + "#)"
        return (
            link[1]
            + posixpath.relpath(place_in_site(target), posixpath.dirname(uri) or ".")
            + link[3]
        )

    pieces = re.split(r"(^```.*?^```$)", text, flags=re.DOTALL | re.MULTILINE)
    return "".join(
        piece if piece.startswith("```") else LINK.sub(follow, piece) for piece in pieces
    )


def keys(schema: Mapping[str, Any], title: str) -> Iterator[str]:
    """A JSON Schema as tables in Markdown: one for the document, one for each of its parts, by the key that it is written at."""
    defs = {name: part for name, part in schema.get("$defs", {}).items() if part.get("properties")}
    titles = name_parts(schema, defs)
    for name, part in {title: schema, **{name: defs[name] for name in titles}}.items():
        yield f"\n### {titles.get(name, name)}\n\n{part.get('description', '')}\n"
        yield "| key | type | default | is |\n|---|---|---|---|"
        for key, value in part["properties"].items():
            default = (
                f"`{value['default']}`"
                if value.get("default") is not None
                else "required"
                if key in part.get("required", ())
                else ""
            )
            text = " ".join(value.get("description", "").split()).replace("|", "\\|")
            yield f"| `{key}` | {kind_of(value, titles)} | {default} | {text} |"


def name_parts(schema: Mapping[str, Any], defs: Mapping[str, Any]) -> dict[str, str]:
    """The parts of a JSON Schema by name, each with the key at which it is first written, and its kind if there are several."""
    found: dict[str, str] = {}
    waiting = [("", schema)]
    for path, part in waiting:
        for key, value in part["properties"].items():
            refs = [ref for ref in re.findall(r"#/\$defs/(\w+)", json.dumps(value)) if ref in defs]
            for name in dict.fromkeys(refs):
                if name in found:
                    continue
                kind = defs[name]["properties"].get(
                    "kind", defs[name]["properties"].get("design", {})
                )
                more = f" of the kind {kind['const']}" if "const" in kind else ""
                title = f"{path}{key}{more}"
                taken = title in found.values()
                found[name] = f"{title} ({name})" if taken else title
                waiting.append((f"{path}{key} / ", defs[name]))
    return found


def find_anchor(title: str) -> str:
    """The anchor that the site gives a heading."""
    return re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-")


def kind_of(value: Mapping[str, Any], titles: Mapping[str, str]) -> str:
    """A key's type in words, its parts as links to their tables."""
    if "$ref" in value:
        title = titles.get(name := value["$ref"].rpartition("/")[2])
        return f"[{title}](#{find_anchor(title)})" if title else name
    if "const" in value or "enum" in value:
        return " or ".join(f"`{one}`" for one in value.get("enum", [value.get("const")]))
    choices = value.get("anyOf") or value.get("oneOf")
    if choices:
        return (
            " or ".join(
                dict.fromkeys(
                    kind_of(choice, titles) for choice in choices if choice.get("type") != "null"
                )
            )
            or "null"
        )
    if value.get("type") == "array":
        return f"list of {kind_of(value.get('items', {}), titles)}"
    if (
        value.get("type") == "object"
        and isinstance(value.get("additionalProperties"), dict)
        and value["additionalProperties"]
    ):
        return f"mapping to {kind_of(value['additionalProperties'], titles)}"
    return str(value.get("type", "anything"))


def commands(command: click.Command, name: str) -> Iterator[str]:
    """The help of every verb; each keeps the names of the option `--help` that it is first asked with."""
    context = click.Context(
        command, info_name=name, max_content_width=110, help_option_names=["-h", "--help"]
    )
    yield f"### {name}\n\n```text\n{command.get_help(context)}\n```\n"
    for verb, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, f"{name} {verb}")


def generate(name: str) -> str:
    """The part of a reference page that is computed from the code."""
    from dpdask.cli import cli
    from dpdask.schemas import find_file

    if name == "command-line":
        return "\n".join(commands(cli, "dpdask"))
    return "\n".join(
        keys(json.loads(find_file(name).read_text(encoding="utf-8")), name.capitalize())
    )


def notebook(text: str, folder: Path) -> str:
    """A tutorial as a notebook: files are written by cells, and what was printed or drawn, in pictures of the folder, is their output."""
    import jupytext
    from nbformat import v4

    printed: list[list[Any]] = []
    for kind, block, told, name in re.findall(CELL, text):
        if name and printed:
            drawn = base64.b64encode((folder / name).read_bytes()).decode()
            data = {"image/png": drawn, "text/plain": told}
            printed[-1].append(v4.new_output("display_data", data))
        elif kind == "text" and printed:
            printed[-1].append(v4.new_output("stream", text=block))
        elif kind:
            printed.append([])
    text = re.sub(CELL, lambda each: each[0] if each[1] not in ("text", None) else "", text)
    text = re.sub(
        r"^```yaml\n# (\S+\.yaml)\n", r"```python\n%%writefile \1\n", text, flags=re.MULTILINE
    )
    found = jupytext.reads(text, fmt="md")
    cells = [cell for cell in found.cells if cell.cell_type == "code"]
    if len(cells) == len(printed):  # each block is a cell
        for number, (cell, blocks) in enumerate(zip(cells, printed, strict=True), 1):
            cell.execution_count = number if blocks else None
            cell.outputs = blocks
    return str(jupytext.writes(found, fmt="ipynb"))


def release_pages() -> dict[str, str]:
    """The release pages of the gallery, made anew."""
    from pipelines.gallery.make import release

    with tempfile.TemporaryDirectory() as folder:
        found = release(Path(folder))
        return {
            name: (out / "_dpdask" / "release.html").read_text(encoding="utf-8")
            for name, out in found.items()
        }


def on_files(files: Any, config: Any) -> Any:
    """Add the pages and the linked files that lie outside docs/, and a notebook for each tutorial."""
    from mkdocs.structure.files import File

    inside = [
        path.relative_to(ROOT).as_posix()
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*")
        if path.is_file()
    ]
    names = ["docs/README.md", *SHOWN, *(name for name in inside if "__pycache__" not in name)]
    for name in names:
        files.append(File.generated(config, place_in_site(name), abs_src_path=str(ROOT / name)))
    for name, page in release_pages().items():
        files.append(File.generated(config, f"{PAGES}{name}.html", content=page))
    for page in list(files.documentation_pages()):
        if page.src_uri.startswith("tutorials/"):
            files.append(
                File.generated(
                    config,
                    page.src_uri.replace(".md", ".ipynb"),
                    content=notebook(page.content_string, ROOT / "docs" / "tutorials"),
                )
            )
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Fill in what is generated, and turn the repository's links into the site's."""
    text = re.sub(r"<!-- generated: (\S+) -->", lambda found: generate(found[1]), markdown)
    text = with_links(text, page.file.src_uri)
    if page.file.src_uri == "gallery.md":  # its pages are there once they are made
        text = re.sub(r"`(\w+\.html)`", rf"[\1]({PAGES}\1)", text)
    if page.file.src_uri.startswith("tutorials/"):
        name = Path(page.file.src_uri).stem
        text = text.replace("\n", f"\n\n[Download this page as a notebook]({name}.ipynb)\n", 1)
    return text
