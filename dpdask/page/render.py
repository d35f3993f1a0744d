"""The page of a release: one file that loads nothing, for people who read, print or listen to it."""

from __future__ import annotations

import json
import math
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from decimal import ROUND_DOWN, ROUND_UP, Context, Decimal
from html import escape
from pathlib import Path
from typing import Any

import pyarrow as pa

from dpdask.archive import Named
from dpdask.documents import write_new
from dpdask.errors import list_names, say_count
from dpdask.html import read_file, read_style, render_page
from dpdask.io.folders import name_folders, split_folders
from dpdask.io.parquet import read_schema
from dpdask.io.shards import CARD_NAME, TABLE_FOLDER, Manifest
from dpdask.io.storage import Folder
from dpdask.mechanisms.card import (
    About,
    Card,
    CoveredContent,
    CoveredRows,
    find_guidance,
    say_date,
)
from dpdask.mechanisms.expectations import LITTLE, Planned, describe_ledger
from dpdask.page.pictures import (
    MAX_ASSOCIATED,
    ChannelView,
    associate,
    count_histogram,
    describe_kept,
    draw_table,
    label_level,
    list_channels,
    read_sample,
    read_tables,
)
from dpdask.privacy import attacker_power, percent_above
from dpdask.privacy.budget import HEADS, bound_belief, bound_values, order_text, write_above
from dpdask.privacy.events import FINE
from dpdask.scales import is_real, say_number
from dpdask.schema import ABOVE
from dpdask.version import __version__

CONFORMS_TO = "http://mlcommons.org/croissant/1.0"
MAX_FILES = 500
_PARQUET = "application/x-parquet"
_EVERY_SHARD = {
    "@type": "cr:FileSet",
    "@id": "shards",
    "name": "shards",
    "encodingFormat": _PARQUET,
}


def make_croissant(card: Card, manifest: Manifest, shards: Folder) -> tuple[bytes, tuple[str, ...]]:
    """Return the metadata as JSON-LD, and warnings about what they lack: the same release, the same bytes."""
    try:
        tables = manifest.tables or {"": manifest}
        firsts = {name: own.shards[0] for name, own in tables.items()}
        types = {
            name: read_schema(shards, first.name, first.n_bytes) for name, first in firsts.items()
        }
        return _describe(card, manifest, types), ()
    except Exception as error:
        fault = (
            f"the metadata of the release were written without its columns ({type(error).__name__})"
        )
    return _describe(card, manifest, None), (fault,)


def _describe(card: Card, manifest: Manifest, types: Mapping[str, pa.Schema] | None) -> bytes:
    identifier = manifest.card_sha256[:32] if card.release is None else card.release.id
    about = card.about or About()
    content: Content = {
        "@context": json.loads(read_file(__package__, "croissant-context.json")),
        "@type": "sc:Dataset",
        "conformsTo": CONFORMS_TO,
        "name": card.name,
        "description": card.guarantee.text,
        "version": f"1.{(card.series or {}).get('release', 0)}.0",
        "identifier": identifier,
        "sdVersion": __version__,
        "isLiveDataset": False,
    }
    if about.licence:
        content["license"] = about.licence
    if about.issuer:
        content["creator"] = {"@type": "sc:Organization", "name": about.issuer}
    if about.purpose:
        content["rai:dataUseCases"] = about.purpose
    if card.release is not None:
        content["datePublished"] = card.release.time
    if about.issuer:
        content["citeAs"] = f"{about.issuer}: {card.name}, release {identifier}"
    content["rai:personalSensitiveInformation"] = card.guarantee.text
    files = [
        {
            "@type": "cr:FileObject",
            "@id": shard.name,
            "name": shard.name,
            "contentUrl": f"../{shard.name}",
            "contentSize": f"{shard.n_bytes} B",
            "encodingFormat": _PARQUET,
            "sha256": shard.sha256,
        }
        for shard in manifest.shards[:MAX_FILES]
    ]
    one, tables = len(files) == 1, manifest.tables
    folders = split_folders(manifest.shards[0].name) if manifest.shards and not tables else {}
    every = {**_EVERY_SHARD, "includes": f"../{'*/' * len(folders)}*.parquet"}
    sets = {"": every}
    if tables:
        includes = {name: f"../{TABLE_FOLDER}={name}/*.parquet" for name in tables}
        sets = {
            name: {**_EVERY_SHARD, "@id": f"shards-{name}", "name": name, "includes": each}
            for name, each in includes.items()
        }
    content["distribution"] = files if one else [*files, *sets.values()]
    content["recordSet"] = []
    for table, columns in (types or {}).items():
        kind, place = ("fileObject", files[0]) if one else ("fileSet", sets[table])
        source, name = {kind: {"@id": place["@id"]}}, table or "rows"
        fields = [_describe_field(card, name, each, source, folders) for each in columns]
        rows = {"@type": "cr:RecordSet", "@id": name, "name": name, "field": fields}
        content["recordSet"].append(rows)
    if types is None:
        del content["recordSet"]
    return (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode()


def _describe_field(
    card: Card, table: str, field: pa.Field, source: Named, folders: Named
) -> Content:
    found: Content = {
        "@type": "cr:Field",
        "@id": f"{table}/" + re.sub(r"\s", "·", field.name),  # an IRI has no space
        "name": field.name,
    }
    part = card.columns.get(field.name)
    if part is not None:
        found["description"] = ", ".join(filter(None, (part.role, part.kind)))
    known = {
        "sc:Boolean": pa.types.is_boolean,
        "sc:Integer": pa.types.is_integer,
        "sc:Float": is_real,
        "sc:Date": pa.types.is_date,
        "sc:DateTime": pa.types.is_timestamp,
        "sc:Time": pa.types.is_time,
    }
    found["dataType"] = next((name for name, is_ in known.items() if is_(field.type)), "sc:Text")
    read: Content = {"extract": {"column": field.name}}
    if field.name in folders:
        pattern = f"{re.escape(name_folders({field.name: ''}))}([^/]*)/"
        read = {"extract": {"fileProperty": "fullpath"}, "transform": {"regex": pattern}}
    return found | {"source": {**source, **read}}


MAX_COLUMNS = 50
MAX_SHARDS = 50
PRIORS = (0.01, 0.1, 0.5, 0.9)
ALARMS = (0.01, 0.05, 0.1)
N_ROWS_OF_A_PERSON = 5
_NARROW = 0.1
_OUTSIDE = {
    "clip": "moved to the nearest bound",
    "null": "become missing",
    "refuse": "none: they stop the run",
}

Content = dict[str, Any]


def write_page(card: Named, path: str | Path) -> None:
    """Write the page of a release from its card alone: of a frame, of a survey, or of a folder that `dpdask.open` opened.

    It is the page that a job writes, without statistics of the released rows and without the hashes
    of their files. If a part of it cannot be made, a warning says so.

    Parameters
    ----------
    card
        The card, as `Release.card` or `Survey.card` gives it. A `name` and an `about` in it are
        shown: who issues the release, for what, and on which terms.

    Privacy
    -------
    The page is a function of the card, so it costs no ε and may be published with it.

    Examples
    --------
    >>> import tempfile, pandas as pd, dpdask
    >>> from pathlib import Path
    >>> schema = dpdask.Schema.from_dict({"columns": {"x": {"role": "privatise", "kind": "discrete", "levels": [0, 1]}}})
    >>> release = dpdask.DIP(schema, epsilon=1.0, reference=dpdask.Histogram()).fit(pd.DataFrame({"x": [0, 1] * 50}))
    >>> path = Path(tempfile.mkdtemp()) / "release.html"
    >>> dpdask.write_page({**release.card, "name": "visits", "about": {"issuer": "The clinic"}}, path)
    >>> "Issued by The clinic" in path.read_text(encoding="utf-8")
    True
    """
    page, faults = make_page(Card.read(card, "card"))
    for fault in faults:
        warnings.warn(fault, stacklevel=2)
    write_new({str(path): page})


def make_page(
    card: Card, manifest: Manifest | None = None, shards: Folder | None = None
) -> tuple[bytes, tuple[str, ...]]:
    """Return the page of a release, and warnings about what it lacks: the same release, the same bytes.

    Without a manifest, it is made from the card alone. The budget of the release is spent by now: a
    page whose statistics cannot be made is written without them, and if need be with the promise
    alone.
    """
    try:
        found = None if manifest is None or shards is None else _count(card, manifest, shards)
        return _render(card, manifest, found, list_channels(card), describe_kept(card)), ()
    except Exception as error:
        fault = type(error).__name__
    with suppress(Exception):
        return _render(card, manifest, None, [], ([], [])), (
            f"the page of the release was written without statistics ({fault})",
        )
    name, promise = escape(card.name), escape(card.guarantee.text)
    policy = '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'">'
    head = f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n{policy}\n<title>{name}</title>\n</head>'
    page = f"{head}\n<body>\n<main>\n<h1>{name}</h1>\n<p>{promise}</p>\n</main>\n</body>\n</html>\n"
    return page.encode(), (f"the page of the release holds its promise alone ({fault})",)


def make_plan_page(card: Card, planned: Planned) -> bytes:
    """Return the page of a release that is planned, from what is known before any row is read."""
    return _render(card, None, None, [], ([], []), planned)


def _render(
    card: Card,
    manifest: Manifest | None,
    statistics: Content | None,
    channels: list[ChannelView],
    kept: tuple[list[str], list[str]],
    planned: Planned | None = None,
) -> bytes:
    guidance, names = find_guidance(card), list(card.columns)
    good, bad = ([], []) if planned else list_uses(card)
    filters: dict[str, Callable[..., object]] = {
        "number": say_number,
        "above": write_above,
        "percent": percent_above,
        "channel": _draw_channel,
    }
    # the promise as paragraphs; of a card of an earlier version, as one
    parts = card.guarantee.parts or ()
    shown = [{"head": HEADS.get(each.part, "").strip(), "text": each.text} for each in parts]
    values = {
        "style": read_style(__package__, "release.css"),
        "card": card,
        "guarantee": card.guarantee,
        **_describe_first(card, planned),
        "promise": (shown or [{"head": "", "text": card.guarantee.text}]),
        "about": card.about,
        "guidance": guidance,
        "persons": None if manifest is None else manifest.n_persons,
        "n_persons": card.mechanism.details.get("persons"),
        "has_rows": guidance.shape(card) in ("rows", "ranges"),
        "gain": describe_gain(card),
        "again": describe_again(card),
        "left": describe_left(card),
        "shuffled": order_text("shuffled"),
        "manifest": manifest,
        "earlier": [
            (each.id, write_above(each.epsilon), write_above(each.delta, 3))
            for each in (card.ledger.earlier if card.ledger else ())
        ],
        "attacker": _describe_attacker(card),
        "spent": list(list_spent(card)),
        "columns": [describe_column(name, card) for name in names[:MAX_COLUMNS]],
        "kept": _list_kept(card),
        "statistics": statistics,
        "channels": channels,
        "max_associated": MAX_ASSOCIATED,
        "max_columns": MAX_COLUMNS,
        "max_shards": MAX_SHARDS,
        "good": good,
        "bad": bad,
        "qualities": kept[0],
        "little": kept[1],
        "least": LITTLE,
        "snippet": write_snippet(card) if manifest else "",
        "card_name": CARD_NAME,
    }
    return render_page(__package__, "release.html", filters, values).encode()


# the first screen: whom the promise covers, whom and what it does not, and what to ask before signing


def _describe_first(card: Card, planned: Planned | None) -> Content:
    return {
        "planned": planned,
        "title": _say_title(card, planned=planned is not None),
        "who": _say_covered(card),
        "whose": _say_whose(card),
        "lacks": _say_lack(card),
        "checks": list(
            _list_checks(card, counted=bool(card.ledger or (planned and planned.ledger)))
        ),
        "ledger": describe_ledger(planned.ledger)[0][12:] if planned else "",
        "errors": [
            (each["on"], f"{each['sigma']:.3g}", f"± {each['margin_95']:.3g}")
            for each in (planned.noise if planned else ())
        ],
    }


def _say_title(card: Card, *, planned: bool) -> str:
    name, released = card.name[:1].upper() + card.name[1:], "planned" if planned else "released"
    if card.insecure:
        return f"{name}, {released} for tests: it protects nobody"
    if card.guarantee.epsilon is None:
        return f"{name}, {released} as ranges, with no ε"
    covered = _say_covered(card)
    return f"{name}, {released} with ε = {write_above(card.guarantee.epsilon)} for {covered[:1].lower()}{covered[1:]}"


def _say_covered(card: Card) -> str:
    """Return which units the promise covers, in a few words; a share is rounded down."""
    protected, unit = card.guarantee.protected, card.guarantee.unit
    if card.insecure:
        return "Nobody"
    if card.guarantee.epsilon_private:
        return f"Every {_name_unit(card)}: its {list_names(card.guarantee.epsilon_private, 3)}"
    if isinstance(protected, CoveredContent):
        return "Every value, by a range"
    if protected.fraction < 1.0:
        of = "rows" if isinstance(unit, str) else f"values of {unit.column}"
        return f"{math.floor(1000 * protected.fraction + 1e-9) / 10:g} % of the {of}"
    return f"Every {_name_unit(card)}"


def _name_unit(card: Card) -> str:
    unit = card.guarantee.unit
    return unit if isinstance(unit, str) else unit.label


def _say_whose(card: Card) -> str:
    """Return whose values are guessed at, in words."""
    covered = "protected " if card.has_holdout else ""
    private = card.guarantee.epsilon_private
    whole = f" (its {', '.join(private)})" if private else ""
    return f"a {covered}{'row' if card.guarantee.epsilon is None else _name_unit(card)}{whole}"


def _say_lack(card: Card) -> str:
    """Return the first thing that the promise does not cover, in a few words."""
    left_out, kept = card.guarantee.unprotected, _list_kept(card)
    if isinstance(left_out, CoveredRows) and left_out.fraction:
        return f"{math.ceil(1000 * left_out.fraction - 1e-9) / 10:g} % of the {left_out.of}"
    if kept:
        return say_count(len(kept), "copied column")
    is_of_rows = find_guidance(card).shape(card) in ("rows", "ranges")
    return "Presence" if is_of_rows else "General conclusions only"


def _list_kept(card: Card) -> list[str]:
    return [name for name, part in card.columns.items() if part.role == "kept"]


def _list_checks(card: Card, *, counted: bool) -> Iterator[str]:
    """Yield what the signer must know, since the card cannot tell it."""
    unit, kept, about = card.guarantee.unit, _list_kept(card), card.about or About()
    if isinstance(unit, str):
        less = "no bound holds for several values together"
        if unit == "row":
            twice = card.guarantee.adjacency == "add-remove"
            less = f"one with k rows is protected by k·ε only{', and its values by 2k·ε' if twice else ''}"
        yield f"Each person has at most one row; or I accept that {less}."
    else:
        whom = unit.name or "person, or whatever is to be protected"
        yield f"Each value of {unit.column} is one {whom}, and none of them has two values."
    if kept:
        yield f"The copied columns ({list_names(kept, 8)}) are public, even when combined with each other or with other tables."
    where = f" Source: {about.domains}" if about.domains else " The issuer names no source."
    found = [name for name, part in card.columns.items() if "threshold" in (part.model_extra or {})]
    but = f", other than the levels of {list_names(found, 8)} that ε covers," if found else ""
    most = (
        ""
        if isinstance(unit, str)
        else f", and the limit of {unit.max_rows} rows of each {unit.label},"
    )
    yield f"Levels, bounds and declared cells{but}{most} do not come from the private rows.{where}"
    if isinstance(card.guarantee.unprotected, CoveredRows) and card.guarantee.unprotected.fraction:
        yield (
            "Everybody in the table has agreed that chance may leave out their rows."
            if card.has_holdout
            else "The people whom the promise leaves out have agreed."
        )
    if card.guarantee.adjacency != "add-remove":
        yield "No harm is done if others learn who is in the table."
    yield (
        "These data are released under no other ledger, and no other dataset of this one."
        if counted
        else "I know all other releases of these data; no ledger counts them here."
    )
    if card.guarantee.cautions:
        yield "I have read and accept the cautions above."


# what an attacker gains, what another release would cost, and what a ledger leaves


def list_losses(
    epsilon: float, delta: float, adjacency: str | None
) -> dict[str, tuple[float, float]]:
    """Return ε and δ of each statement about a unit: under add-remove its presence has the promised ones, and its values have twice them."""
    if adjacency != "add-remove":
        return {"one value rather than another": (epsilon, delta)}
    return {
        "it is there": (epsilon, delta),
        "one value rather than another": bound_values(epsilon, delta, "add-remove"),
    }


def describe_beliefs(
    losses: Mapping[str, tuple[float, float]], *, persons: bool
) -> tuple[list[str], list[tuple[str, ...]]]:
    """Return heads and rows of a table: a belief before the release, and the most that it can become; also for persons with several rows."""
    listed = [(what, n) for n in ((1, N_ROWS_OF_A_PERSON) if persons else (1,)) for what in losses]
    heads = [
        what if n == 1 else f"{what}, for a person with {n} protected rows" for what, n in listed
    ]
    return heads, [
        (f"{100 * prior:g} %", *(bound_belief(prior, n * losses[what][0]) for what, n in listed))
        for prior in PRIORS
    ]


def describe_tests(losses: Mapping[str, tuple[float, float]]) -> list[tuple[str, ...]]:
    """Return rows of a share of false alarms and the most that each test with it can find."""
    powers = {each: [attacker_power(*loss, each) for loss in losses.values()] for each in ALARMS}
    return [(f"{100 * each:g} %", *map(percent_above, found)) for each, found in powers.items()]


def bound_guess(epsilon: float, delta: float) -> float:
    """Return how often a guess between two statements that are equally likely is right, at most.

    Notes
    -----
    1 - (α + β) / 2, where α + e^ε·β ≥ 1 - δ and e^ε·α + β ≥ 1 - δ: the least sum of errors is
    2·(1 - δ) / (1 + e^ε).

    References
    ----------
    Kairouz, Oh and Viswanath 2015, Theorem 2.1.
    """
    return 1.0 - (1.0 - delta) / (1.0 + math.exp(min(epsilon, 100.0)))


def describe_odds(epsilon: float) -> str:
    """Return the factor exp(ε), rounded up."""
    factor = math.exp(min(epsilon, 100.0))
    if factor < 1000:
        return f"{math.ceil(1000 * factor) / 1000:g}"
    return f"{Context(prec=3, rounding=ROUND_UP).plus(Decimal(factor)):.3g}"


def describe_gain(card: Card) -> str:
    """Return what a release may change in a belief, in words that can be repeated; empty if no ε is promised, or it protects nobody."""
    epsilon = card.guarantee.epsilon
    if epsilon is None or card.insecure:
        return ""
    losses = list_losses(epsilon, card.guarantee.delta or 0.0, card.guarantee.adjacency)
    said = ("is in the table", "has one value rather than another")[-len(losses) :]
    gains = [
        f"that {_say_whose(card)} {each} becomes one of at most {bound_belief(0.5, loss)}"
        for each, (loss, _) in zip(said, losses.values(), strict=True)
    ]
    apart = ", apart from δ" if card.guarantee.delta else ""
    return f"To someone who knows everything else, a belief of 50 % {', and one of 50 % '.join(gains)}{apart}."


def describe_again(card: Card) -> str:
    """Return what this release and a second one like it would cost, in words.

    Empty if no ε is promised, or it protects nobody; also with a hold-out and no ledger, where the
    second release holds out other rows: no ε bounds what it tells about rows that this one
    protects.
    """
    epsilon, delta = card.guarantee.epsilon, card.guarantee.delta or 0.0
    if epsilon is None or card.insecure or (card.has_holdout and card.ledger is None):
        return ""
    name, loss = list(list_losses(2.0 * epsilon, 2.0 * delta, card.guarantee.adjacency).items())[-1]
    at = f" and δ = {write_above(2.0 * delta, 3)}" if delta else ""
    found = f"a test of {name}, at a false-alarm rate of 5 %, would detect it with probability at most {percent_above(attacker_power(*loss))}"
    whose = "a row that both protect" if card.has_holdout else "the same rows"
    return f"This release and a second one like it, of {whose}, would spend at most ε = {write_above(2.0 * epsilon)}{at} together: {found}."


def describe_left(card: Card) -> str:
    """Return the ε that a ledger leaves at most, rounded down; empty where it is no difference, as with δ."""
    ledger = card.ledger
    if ledger is None or ledger.epsilon is None or ledger.delta_limit:
        return ""
    left = Context(prec=6, rounding=ROUND_DOWN).plus(
        max(Decimal(0), Decimal(repr(ledger.epsilon_limit)) - Decimal(write_above(ledger.epsilon)))
    )
    return f"ε = {left.normalize():f}"


def _describe_attacker(card: Card) -> Content | None:
    """Return the tables of what an attacker gains; None where no ε is promised."""
    guarantee, ledger = card.guarantee, card.ledger
    if guarantee.epsilon is None:
        return None
    losses = list_losses(guarantee.epsilon, guarantee.delta or 0.0, guarantee.adjacency)
    parts = list(card.columns.items())[:MAX_COLUMNS]
    columns = [(name, part.epsilon) for name, part in parts if part.epsilon is not None]
    together = None
    if ledger is not None and ledger.n_earlier and ledger.epsilon is not None:
        # this ε is the one at the δ of the limit
        all_losses = list_losses(ledger.epsilon, ledger.delta_limit, guarantee.adjacency)
        together = percent_above(attacker_power(*all_losses["one value rather than another"]))
    heads, beliefs = describe_beliefs(losses, persons=guarantee.unit == "row")
    return {
        "together": together,
        "odds": [(describe_odds(each), delta) for each, delta in losses.values()],
        "guesses": [bound_guess(*loss) for loss in losses.values()],
        "after": [f"After: {head}" for head in heads],
        "detected": [f"Detected: {head}" for head in losses],
        "beliefs": beliefs,
        "tests": describe_tests(losses),
        "columns": [
            (name, write_above(each), describe_odds(each), bound_belief(0.5, each))
            for name, each in columns
        ],
    }


def list_uses(card: Card) -> tuple[list[str], list[str]]:
    """Return what the release is good for, and what it is not good for."""
    good, bad = find_guidance(card).uses(card)
    seeded = ["Anything but tests: its noise comes from a seed, so it protects nobody."]
    return good, [*(seeded if card.insecure else []), *bad]


def list_spent(card: Card) -> Iterator[tuple[str, str]]:
    """Yield what was computed with noise, and how much noise or ε that was."""
    accounting = card.accounting.details
    counted, laws = accounting.get("epsilon_reference", {}), []
    for event in _flatten(card.accounting.events or {}):
        if event.get("kind") == "discrete-laplace":
            laws.append((f"discrete Laplace, scale {event['scale']:.6g}", event.get("count", 1)))
        elif event.get("kind") == "discrete-gaussian":
            whole = event["sensitivity"] if event["sensitivity"] >= FINE else 1.0
            parts = f", in parts of 1/{whole:,.0f}" if whole > 1.0 else ""
            law = f"discrete Gaussian, σ = {event['sigma'] / whole:.6g}{parts}"
            laws.append((law, event.get("count", 1)))
    by_column = len(counted) == len(laws)  # then each law is that of a column's counts
    for place, (name, each) in enumerate(list(counted.items())[:MAX_COLUMNS]):
        noise = f"; {laws[place][0]} on {_say_vectors(laws[place][1])}" if by_column else ""
        yield f"Noisy counts of {name}, for the reference", f"ε = {write_above(each)}{noise}"
    if "epsilon_tables" in accounting:
        tables = write_above(accounting["epsilon_tables"])
        yield "Noisy tables of all rows, for the reference", f"ε = {tables}"
    for name, part in list(card.columns.items())[:MAX_COLUMNS]:
        if part.epsilon is not None:
            less = part.epsilon_exact is not None and part.epsilon_exact < 0.999 * part.epsilon
            exact = f", of which {write_above(part.epsilon_exact or 0.0)} are spent" if less else ""
            yield f"Each released row, {name}", f"ε = {write_above(part.epsilon)}{exact}"
    whose = "persons" if "persons" in card.mechanism.details else "rows"
    for name, each in list(accounting.get("noise", {}).items())[:MAX_COLUMNS]:
        yield (
            f"Noise of a count, {find_guidance(card).counts(name)}",
            f"standard deviation {each['standard_deviation']:.4g}, 95 % margin ± {each['margin_95']:.4g} {whose}",
        )
    alike: Counter[str] = Counter()
    for law, n_vectors in () if by_column else laws:
        alike[law] += n_vectors
    for law, n_vectors in alike.items():
        yield f"Noise on {_say_vectors(n_vectors)}", law


def _say_vectors(n_vectors: int) -> str:
    return f"{n_vectors:,} vector{'' if n_vectors == 1 else 's'} of counts"


def _flatten(event: Named) -> Iterator[Named]:
    for inner in event.get("events", ()):
        yield from _flatten(inner)
    if "events" not in event:
        yield event


def describe_column(name: str, card: Card) -> Content:
    """Return a released column with its domain, and what becomes of values outside it, in words."""
    part = card.columns[name]
    stated = part.details
    levels, bounds = stated.get("levels"), stated.get("bounds")
    if levels is not None:
        some = ", ".join(map(label_level, levels[:8]))
        domain = f"{len(levels):,} levels: {some}{', …' if len(levels) > 8 else ''}"
    elif bounds:
        domain = " to ".join(
            say_date(bound, stated.get("numbers"))
            or (say_number(bound) if isinstance(bound, int | float) else str(bound))
            for bound in bounds
        )
        domain += f", in {stated['numbers']}" if "unit" in stated else ""
    else:
        domain = "as it is" if part.role == "kept" else stated.get("from", "")
    domain += ", or missing" if stated.get("nulls") == "level" and levels is None else ""
    others = (part.outside or "").removeprefix(f"{ABOVE}; ")
    outside = _OUTSIDE.get(others, others.replace("other: ", "become "))
    if others != (part.outside or ""):
        outside = f"become what is above them in the taxonomy; others: {outside}"
    return {"name": name, "part": part, "domain": domain, "outside": outside}


# what the released rows show


def _count(card: Card, manifest: Manifest, shards: Folder) -> Content:
    """Return the histograms of released columns, their associations, and how narrow released ranges are."""
    names = [name for name, part in card.columns.items() if part.role == "privatised"][:MAX_COLUMNS]
    is_tables = find_guidance(card).shape(card) == "tables"
    more = ["table", "count", "margin_95"] if is_tables else ["weight", *_coverages(card).values()]
    histograms: list[Any] = []
    read = []
    for table, part in (manifest.tables or {"released rows": manifest}).items():
        sample = read_sample(
            shards, part, [*names, *more], card
        )  # of several tables, the rows come last
        n_read, n_rows = sample.rows.num_rows, sample.n_rows
        what = {"parents": "persons", "children": "rows"}.get(table, table)
        some = f"{n_read:,} of {n_rows:,} {what}, spread evenly over the files"
        read.append(f"all {n_rows:,} {what}" if n_read == n_rows else some)
        if is_tables:
            histograms, pairs = read_tables(card, sample)[:MAX_COLUMNS], None
        else:
            known = [name for name in names if name in sample.rows.column_names]
            counted = [count_histogram(name, sample, card) for name in known]
            histograms += [each for each in counted if each is not None]
            pairs = associate(known, sample, card)
    picture = None
    if pairs is not None:
        picture = draw_table(pairs.table, pairs.columns, across="", down="", most=1.0)
    narrow = {
        name: float((shares < _NARROW).mean())
        for name, made in _coverages(card).items()
        if len(shares := sample.rows[made].drop_null().to_numpy())
    }
    return {
        "histograms": histograms,
        "associations": pairs,
        "strongest": []
        if pairs is None
        else [(f"{a} and {b}", f"{v:.2f}") for a, b, v in pairs.list_strongest(10)],
        "picture": picture,
        "narrow": narrow,
        "read": " and ".join(read),
    }


def _coverages(card: Card) -> dict[str, str]:
    """Return, by private column, the released column that holds the coverage of its ranges."""
    released = {
        name: part.details.get("released_as", [])
        for name, part in list(card.columns.items())[:MAX_COLUMNS]
    }
    return {name: made[2] for name, made in released.items() if len(made) == 3}


def _draw_channel(view: ChannelView) -> str:
    what, most = "rank" if view.of_ranks else "value", float(view.matrix.max())
    across, down = f"released {what}", f"original {what}"
    return draw_table(view.matrix, view.labels, across=across, down=down, most=most)


def write_snippet(card: Card) -> str:
    """Return Python that opens the release and asks it something that it answers: of numbers rather than of dates and times."""
    lines = [
        "import dpdask",
        "",
        'release = dpdask.open("path/or/url/of/the/folder"'
        + (")" if card.series is None else ', card="…")  # the name of its card in _dpdask'),
        "release.columns  # what each column is, and which questions it answers",
        *(f"release.{question}" for question in find_guidance(card).questions(card)),
        "release.to_pandas()  # the released table as it is; any other reader of Parquet can read it too",
    ]
    return "\n".join(lines)
