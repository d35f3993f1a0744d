"""Run the blocks of a Markdown page in order, in one folder, and write into the page what they print.

python docs/site/examples.py README.md docs/tutorials/*.md

A YAML block that begins with `# NAME.yaml` is a file. The lines of a bash block are commands of dpdask (those that set up an environment are
left out); `# exits with 77` after a command is its expected exit code. A Python block runs with the names of the blocks before it. A text block
holds what the block before it prints; a line `…` in it stands for lines that are left out. It is
left as it is where only numbers would change. Pictures that blocks save are put beside the page if it shows them.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import sys
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from dpdask.cli import cli

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```\n", re.DOTALL | re.MULTILINE)
PICTURE = re.compile(r"^!\[.*\]\((\w+\.png)\)$", re.MULTILINE)
SETUP = re.compile(r"(python3 -m venv|pip install|cd|git clone) ")
WIDTH = 130
HOME = "/home/somebody/demo"


def write_file(text: str, _: dict[str, Any]) -> str:
    name = re.match(r"# (\S+\.ya?ml)\b", text)
    if name is None:
        raise ValueError(
            f"a YAML block begins with the name of its file, as in `# job.yaml`:\n{text}"
        )
    Path(name[1]).write_text(text, encoding="utf-8")
    return ""


def run_commands(text: str, _: dict[str, Any]) -> str:
    printed = ""
    for line in text.splitlines():
        if SETUP.match(line):
            continue
        expected = re.search(r"# exits with (\d+)", line)
        program, *arguments = shlex.split(line, comments=True)
        if program != "dpdask":
            raise ValueError(f"only commands of dpdask are run here, not {line!r}")
        result = CliRunner().invoke(cli, arguments)
        if result.exit_code != int(expected[1] if expected else 0):
            raise ValueError(
                f"{line!r} ended with {result.exit_code}: {result.output}"
            ) from result.exception
        printed += result.stdout if result.exit_code == 0 else result.stderr.splitlines()[-1] + "\n"
    return printed


def run_python(text: str, names: dict[str, Any]) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(text, "example", "exec"), names)  # noqa: S102 - the project's own page
    return printed.getvalue()


RUN: dict[str, Callable[[str, dict[str, Any]], str]] = {
    "yaml": write_file,
    "bash": run_commands,
    "python": run_python,
}


def shown(printed: str, before: str) -> str:
    """What is printed as the page shows it: under a home of somebody, long lines wrapped, cut where the page had a line `…`."""
    lines = printed.rstrip().replace(str(Path.cwd()), HOME).split("\n")
    lines = [
        part
        for line in lines
        for part in textwrap.wrap(line, WIDTH, subsequent_indent=" " * 12, break_on_hyphens=False)
        or [""]
    ]
    if "…" in (kept := before.splitlines()):
        cut = kept.index("…")
        lines = [*lines[:cut], "…", *lines[len(lines) - (len(kept) - cut - 1) :]]
    return "\n".join(lines) + "\n"


def without_numbers(text: str) -> str:
    """A text with its wrapping, numbers and names of runs left out: they differ from run to run."""
    return " ".join(re.sub(r"\b[0-9a-f]{16,}\b|-?\d[\d,.]*(?:e[-+]\d+)?", "#", text).split())


def run_page(text: str) -> str:
    """Run a page's blocks in the working folder; return the page with what they print, but for changed numbers."""
    names: dict[str, Any] = {"__name__": "example"}
    pieces, place, printed = [], 0, ""
    for block in BLOCK.finditer(text):
        language, content = block.groups()
        if language == "text":
            found = shown(printed, content)
            content = content if without_numbers(found) == without_numbers(content) else found
        else:
            printed = RUN[language](content, names)
        pieces += [text[place : block.start()], f"```{language}\n{content}```\n"]
        place = block.end()
    return "".join(pieces) + text[place:]


def main(pages: list[str]) -> None:
    for page in [Path(page).resolve() for page in pages]:
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            text = run_page(page.read_text(encoding="utf-8"))
            page.write_text(text, encoding="utf-8")
            for name in filter(os.path.exists, PICTURE.findall(text)):
                shutil.copy(name, page.parent)
            os.chdir(ROOT)


if __name__ == "__main__":
    main(sys.argv[1:])
