"""`dpdask dossier`: what registries, auditors and catalogues ask of a release, and a statement to sign; from the released folder alone, so it costs no ε."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, StrictUndefined

from dpdask import verifier
from dpdask.errors import InputError, OutputError, SpecError, list_names
from dpdask.html import read_file
from dpdask.io.shards import META
from dpdask.io.storage import Folder, absolute_url
from dpdask.mechanisms.card import About, Card, Terms, find_guidance
from dpdask.page.render import describe_column, list_spent, list_uses
from dpdask.version import __version__

_CONTEXT = "annotation arrayShape containedIn excludes isArray readLines sdVersion unArchive value"
_ENTRY = "registry_entry.yaml"
_LISTS = ("data_curators", "registry_authors")
_MOST = 50  # columns that are told
_HEAD = """# {name}: {title}

Points are named in dpdask's words, and the document is not quoted: compare the list with it. A point is answered by the card, left to a person,
or open: this card lacks the answer, although a card can have it.

| point | answered by | answer |
|---|---|---|
"""

Answers = dict[str, str]


def write_dossier(out: str, to: str | None = None, name: str | None = None) -> tuple[Path, int]:
    """Write the dossier of a release into a new folder, and return it, with how many points are open or for a person.

    Parameters
    ----------
    name
        The name of the release's card, if there are several releases.
    """
    url = absolute_url(out)
    path = Path(to) if to is not None else Path(f"{url.rpartition('/')[2]}-dossier")
    if f"{absolute_url(str(path))}/".startswith(f"{url}/"):
        what = "a dossier cannot be inside the folder that it describes"
        raise OutputError(what, str(path), "name a folder elsewhere with --to")
    files = _read_beside(Folder(url))
    try:
        releases = verifier.find_releases(files)
    except (verifier.RefusedError, ValueError, KeyError, TypeError, RecursionError) as error:
        what = str(error) if isinstance(error, verifier.RefusedError) else "a file is broken"
        raise InputError(what, out, "give the whole output folder of a finished job") from None
    chosen = f"{META}/{name}" if name is not None else next(iter(releases))
    if chosen not in releases or (name is None and len(releases) > 1):
        cards = list_names([each.removeprefix(f"{META}/") for each in releases], 3)
        what = f"this folder holds {len(releases):,} releases, each with its own card"
        raise SpecError(what, out, f"name a card with --card; there are {cards}")
    card = Card.read(files[chosen], chosen)
    if card.insecure:
        what = "the noise is from a seed, so this release protects nobody"
        raise SpecError(what, out, "remove `insecure_seed` from the job, and release again")
    made, n_open = make_dossier(files, chosen, card)
    try:
        path.mkdir()
        for each, data in made.items():
            path.joinpath(each).write_bytes(data)
    except OSError as error:
        what = f"cannot be written ({type(error).__name__})"
        raise OutputError(what, str(path), "name a new folder with --to") from None
    return path, n_open


def _read_beside(folder: Folder) -> dict[str, bytes]:
    """Return the files that a statement is on."""
    names = [f"{META}/{name}" for name in folder.child(META).names()]
    names += [name for name in folder.names() if name == verifier.MARK]
    return {name: folder.read(name, replaced=True) for name in names}


def make_dossier(
    files: Mapping[str, bytes], chosen: str, card: Card
) -> tuple[dict[str, bytes], int]:
    """Return the files of a dossier, and how many points are open or for a person: the same release, the same bytes."""
    asked = yaml.safe_load(read_file(__package__, "dossier.yaml"))
    answers = answer(asked["answers"], card)
    made, open_ = {}, []
    made[_ENTRY], left = make_entry(asked, answers, card)
    open_ += [f"- `{_ENTRY}`: {each}" for each in left]
    for name, table in asked["tables"].items():
        made[name], left = make_table(table, answers, asked["open"], card)
        open_ += [f"- `{name}`: {each}" for each in left]
    metadata = files.get(chosen.replace("/release", "/croissant"), b"{}")
    made["croissant.json"], left = describe_croissant(json.loads(metadata), answers, card)
    open_ += [f"- `croissant.json`: {each}" for each in left]
    made["statement.json"] = verifier.make_statement(files)
    made["verify.py"] = Path(verifier.__file__).read_bytes()
    told = {"name": escape(card.name), "version": __version__, "card": chosen}
    text = read_file(__package__, "dossier.md")
    told |= {"identifier": answers["identifier"], "open": "\n".join(open_)}
    made["README.md"] = text.format(**told).encode()
    return made, len(open_)


def answer(templates: Mapping[str, str], card: Card) -> Answers:
    """Return what a card answers, by name; an answer that it could give and does not give is empty."""
    good, bad = list_uses(card)
    guidance, names = find_guidance(card), list(card.columns)
    columns = [describe_column(name, card) for name in names[:_MOST]]
    lines = [f"{each['name']}: {each['part'].role}, {each['domain']}" for each in columns]
    kept = [name for name, part in card.columns.items() if part.role == "kept"]
    parts = {each.part: each.text for each in card.guarantee.parts or []}
    values = {
        "card": card,
        "about": card.about or About(),
        "terms": card.terms or Terms(trust_model="central"),
        "promise": card.guarantee,
        "unit": card.guarantee.unit,
        "parts": defaultdict(str, parts),
        "guidance": guidance,
        "shape": guidance.shape(card),
        "columns": list_names(names, _MOST),
        "kept": list_names(kept, _MOST) if kept else "",
        "domains": "; ".join(lines) + ("; …" if len(names) > _MOST else ""),
        "spent": "; ".join(f"{what}: {how}" for what, how in list_spent(card)),
        "good": " ".join(good) or "–",
        "bad": " ".join(bad) or "–",
    }
    environment = Environment(undefined=StrictUndefined)  # noqa: S701 - of texts; what is Markdown escapes them
    return {
        name: environment.from_string(text).render(values).strip()
        for name, text in templates.items()
    }


def make_entry(asked: Any, answers: Answers, card: Card) -> tuple[bytes, list[str]]:
    """Return a draft of an entry of the registry of deployments, and the fields that it leaves out."""
    found: dict[str, dict[str, Any]] = {}
    left = []
    for group, fields in asked["registry"].items():
        for field, key in fields.items():
            hint = key["person"] if isinstance(key, dict) else asked["open"].get(key, "")
            value: Any = "" if isinstance(key, dict) else answers.get(key, "")
            if key == "parameters":
                value = {"epsilon": card.guarantee.epsilon, "delta": card.guarantee.delta}
                value = "" if value["epsilon"] is None else value
            if value:
                found.setdefault(group, {})[field] = [value] if field in _LISTS else value
            else:
                left.append(f"deployment.{group}.{field}: {hint}")
    named = card.name, answers["issuer"], answers["date"][:4]
    # as scripts/update_slug.py of the registry has it
    slug = "_".join(re.sub(r"\W+", "_", each.lower()) for each in named if each).replace("_", "-")
    entry = {"url_slug": slug, "status": "Draft", "tier": 2, "deployment": found}
    text = yaml.safe_dump(entry, sort_keys=False, allow_unicode=True, width=2**31)
    comments = "".join(f"# open: {each}\n" for each in left)
    return (text + comments).encode(), left


def make_table(
    table: Any, answers: Answers, hints: Mapping[str, str], card: Card
) -> tuple[bytes, list[str]]:
    """Return a table of points in Markdown, each answered by the card, for a person, or open, and those that are not answered."""
    text, left = _HEAD.format(name=escape(card.name), title=table["title"]), []
    for point, key in table["points"]:
        by, said = ("a person", key["person"]) if isinstance(key, dict) else ("card", answers[key])
        if not said:
            by, said = "open", hints[key]
        if by != "card":
            left.append(f"{point} ({by}): {said}")
        text += f"| {point} | {by} | {escape(said)} |\n"
    return text.encode(), left


def escape(text: str) -> str:
    """Return a text as a cell of a table in Markdown, where it makes no mark-up."""
    plain = re.sub(r"([\\|*_\[\]#~])", r"\\\1", " ".join(text.split()))
    return plain.replace("&", "&amp;").replace("<", "&lt;").replace("`", "\\`")


def describe_croissant(
    content: dict[str, Any], answers: Answers, card: Card
) -> tuple[bytes, list[str]]:
    """Return a release's Croissant metadata in version 1.1, with provenance and terms of use, and what a person has to add."""
    context = content.get("@context", {}) | {name: f"cr:{name}" for name in _CONTEXT.split()}
    content["@context"] = context | {"prov": "http://www.w3.org/ns/prov#"}
    content["conformsTo"] = "http://mlcommons.org/croissant/1.1"
    for each in content.get("distribution", []):  # from the released folder, not its `_dpdask`
        for key in ("contentUrl", "includes"):
            if key in each:
                each[key] = each[key].removeprefix("../")
    activity = {
        "@type": "prov:Activity",
        "prov:label": f"dpdask {card.versions['dpdask']}: {answers['mechanism']}",
    }
    if card.release is not None:
        activity["prov:startedAtTime"] = card.release.time
    source = "a private table" + (f" of the dataset {card.ledger.dataset}" if card.ledger else "")
    content["prov:wasDerivedFrom"] = {"@type": "prov:Entity", "prov:label": source}
    content["prov:wasGeneratedBy"] = activity
    if answers["issuer"]:
        agent = {"@type": "prov:Agent", "prov:label": answers["issuer"]}
        content["prov:wasAttributedTo"] = agent
    terms = [f"{head}: {answers[key]}" for head, key in _TERMS.items() if answers[key]]
    content["usageInfo"] = {
        "@type": "CreativeWork",
        "name": "Terms of use",
        "text": " ".join(terms),
    }
    left = [f"{key}: {hint}" for key, hint in _REQUIRED.items() if key not in content]
    return (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode(), left


_TERMS = {"Licence": "licence", "Purpose": "purpose", "Use": "uses"}
_REQUIRED = {
    "url": "the page of the data set",
    "license": "`about.licence` of the job",
    "creator": "`about.issuer` of the job",
    "datePublished": "when it is published",
    "distribution": "the metadata of the release are missing",
}
