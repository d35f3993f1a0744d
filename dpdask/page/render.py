"""The page of a release: one file that loads nothing, for people who read, print or listen to it."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from dpdask.errors import OutputError
from dpdask.html import read_style, render_page
from dpdask.io.shards import CARD_NAME, Manifest
from dpdask.io.storage import Folder
from dpdask.mechanisms.card import Card, say_date
from dpdask.mechanisms.expectations import LITTLE
from dpdask.mechanisms.guidance import bound_belief, find_guidance, round_up
from dpdask.page import pictures, words
from dpdask.page.histograms import (
    ReleasedHistogram,
    Sample,
    count_histogram,
    label_level,
    read_sample,
    read_tables,
)
from dpdask.page.pictures import (
    MAX_ASSOCIATED,
    ChannelView,
    associate,
    describe_kept,
    list_channels,
)
from dpdask.privacy import attacker_power, percent_above

MAX_COLUMNS = 50
MAX_SHARDS = 50
_MOST_CELLS = 12
_NARROW = 0.1
_OUTSIDE = {
    "clip": "moved to the nearest bound",
    "null": "become missing",
    "refuse": "none: they stop the run",
}

Content = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """What a page says about the released rows."""

    histograms: list[Content]  # one for each released column that has one, with its picture
    # The strongest pairs, and the picture of all of them; None where there is none.
    associations: Content | None
    # Columns whose ranges have a released coverage, each with the share of ranges that hold less
    # than a tenth.
    narrow: list[tuple[str, float]]
    n_read: int  # how many released rows were read, and how many there are
    n_rows: int


def write_page(card: Mapping[str, Any], path: str | Path) -> None:
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
    try:
        with Path(path).open("xb") as file:
            file.write(page)
    except FileExistsError:
        raise OutputError(
            "the file is there already", str(path), "remove it, or name another"
        ) from None
    except OSError:
        raise OutputError(
            "cannot be written", str(path), "name a file in a folder that you may write to"
        ) from None


def make_page(
    card: Card, manifest: Manifest | None = None, shards: Folder | None = None
) -> tuple[bytes, tuple[str, ...]]:
    """Return the page of a release, and warnings about what it lacks: the same release, the same bytes.

    Parameters
    ----------
    manifest
        The list of the shards; without it, the page is made from the card alone.

    Notes
    -----
    A page whose statistics cannot be made is written without them, and if need be with the promise
    alone: the budget of its release is spent by now.
    """
    try:
        statistics = (
            None if manifest is None or shards is None else _describe_rows(card, manifest, shards)
        )
        return _render(card, manifest, statistics, list_channels(card), describe_kept(card)), ()
    except Exception as error:
        fault = type(error).__name__
    with suppress(Exception):
        return _render(card, manifest, None, [], ([], [])), (
            f"the page of the release was written without statistics ({fault})",
        )
    return _write_promise(card), (f"the page of the release holds its promise alone ({fault})",)


def _write_promise(card: Card) -> bytes:
    """Return a page with the promise alone."""
    name, promise = escape(card.name), escape(card.guarantee.text)
    policy = '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'">'
    head = f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n{policy}\n<title>{name}</title>\n</head>'
    return f"{head}\n<body>\n<main>\n<h1>{name}</h1>\n<p>{promise}</p>\n</main>\n</body>\n</html>\n".encode()


def _render(
    card: Card,
    manifest: Manifest | None,
    statistics: Statistics | None,
    channels: list[ChannelView],
    kept: tuple[list[str], list[str]],
) -> bytes:
    good, bad = words.list_uses(card)
    qualities, little = kept
    shards = () if manifest is None else manifest.shards
    names = list(card.columns)
    values = {
        "style": read_style(__package__, "release.css"),
        "card": card,
        "guarantee": card.guarantee,
        "about": card.about,
        "kind": find_guidance(card).title,
        "unit": words.describe_unit(card),
        "gain": words.describe_gain(card),
        "again": words.describe_again(card),
        "left": words.describe_left(card),
        "trust": words.describe_trust(card),
        "caution_of_pairs": words.warn_of_associations(card),
        "neighbours": words.describe_neighbours(card.guarantee.adjacency),
        "covered": _say_covered(card, "protected"),
        "uncovered": _say_covered(card, "unprotected"),
        "promise": words.describe_promise(card),
        "published": words.describe_published(card),
        "order": words.describe_order(card, len(shards)),
        "together": words.describe_together(card),
        "manifest": manifest,
        "attacker": _describe_attacker(card),
        "spent": list(_list_spent(card)),
        "spends_on_counts": any(
            told in (card.accounting.model_extra or {})
            for told in ("epsilon_reference", "epsilon_tables")
        ),
        "has_kept": any(part.role == "kept" for part in card.columns.values()),
        "columns": [_describe_column(name, card) for name in names[:MAX_COLUMNS]],
        "n_columns_left": max(0, len(names) - MAX_COLUMNS),
        "statistics": statistics,
        "narrow": [] if statistics is None else statistics.narrow,
        "margins": find_guidance(card).margins(card),
        "channels": [_describe_channel(view) for view in channels],
        "max_associated": MAX_ASSOCIATED,
        "max_columns": MAX_COLUMNS,
        "good": good,
        "bad": bad,
        "qualities": qualities,
        "little": little,
        "least": LITTLE,
        "snippet": _write_snippet(card),
        "shards": shards[:MAX_SHARDS],
        "n_shards_left": max(0, len(shards) - MAX_SHARDS),
        "card_name": CARD_NAME,
    }
    return render_page(
        __package__, "release.html", {"number": _say_number, "above": round_up}, values
    ).encode()


def _say_number(value: float | None) -> str:
    """Return a number with the digits that it has, up to six; whole ones with commas."""
    if value is None:
        return "none"
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:.6g}"


def _say_covered(card: Card, which: str) -> str:
    part = getattr(card.guarantee, which)
    return str(part.who if hasattr(part, "who") else part.what)


def _describe_attacker(card: Card) -> Content | None:
    """Return the tables of what an attacker gains; None where no ε is promised."""
    epsilon = card.guarantee.epsilon
    if epsilon is None:
        return None
    losses = words.list_losses(epsilon, card.guarantee.delta or 0.0, card.guarantee.adjacency)
    columns = [
        (name, part.epsilon)
        for name, part in list(card.columns.items())[:MAX_COLUMNS]
        if part.epsilon is not None
    ]
    ledger, together = card.ledger, None
    if (
        ledger is not None and ledger.n_earlier and ledger.epsilon is not None
    ):  # this ε is the one at the δ of the limit
        values = list(
            words.list_losses(ledger.epsilon, ledger.delta_limit, card.guarantee.adjacency).values()
        )[-1]
        together = percent_above(attacker_power(*values))
    return {
        "together": together,
        "odds": [(words.describe_odds(each), delta) for each, delta in losses.values()],
        "statements": list(losses),
        "beliefs": words.describe_beliefs(losses, persons=card.guarantee.unit == "row"),
        "tests": words.describe_tests(losses),
        "columns": [
            (name, each, words.describe_odds(each), bound_belief(0.5, each))
            for name, each in columns
        ],
    }


def _list_spent(card: Card) -> Iterator[tuple[str, str]]:
    """Yield what was computed with noise, and how much noise or ε that was."""
    told = card.accounting.model_extra or {}
    counted, laws = (
        told.get("epsilon_reference", {}),
        list(_list_laws(card.accounting.events or {})),
    )
    told_apart = len(counted) == len(laws)  # then each law is that of a column's counts
    for place, (name, each) in enumerate(list(counted.items())[:MAX_COLUMNS]):
        noise = f"; {laws[place][0]} on {_say_vectors(laws[place][1])}" if told_apart else ""
        yield f"Noisy counts of {name}, for the reference", f"ε = {round_up(each)}{noise}"
    if "epsilon_tables" in told:
        yield (
            "Noisy tables of all rows, for the reference",
            f"ε = {round_up(told['epsilon_tables'])}",
        )
    for name, part in list(card.columns.items())[:MAX_COLUMNS]:
        if part.epsilon is not None:
            less = part.epsilon_exact is not None and part.epsilon_exact < 0.999 * part.epsilon
            exact = f", of which {round_up(part.epsilon_exact or 0.0)} are spent" if less else ""
            yield f"Each released row, {name}", f"ε = {round_up(part.epsilon)}{exact}"
    for name, each in words.name_counts(card)[:MAX_COLUMNS]:
        noise = f"standard deviation {each['standard_deviation']:.4g}, 95 % margin ± {each['margin_95']:.4g} rows"
        yield f"Noise of a count, {name}", noise
    alike: Counter[str] = Counter()
    for law, n_vectors in () if told_apart else laws:
        alike[law] += n_vectors
    for law, n_vectors in alike.items():
        yield f"Noise on {_say_vectors(n_vectors)}", law


def _list_laws(events: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield each law of central noise, and on how many vectors of counts it was added."""
    for event in _flatten(events):
        if event.get("kind") in ("discrete-laplace", "discrete-gaussian"):
            law = (
                "discrete Laplace, scale"
                if event["kind"] == "discrete-laplace"
                else "discrete Gaussian, σ ="
            )
            yield f"{law} {event.get('scale', event.get('sigma')):.6g}", event.get("count", 1)


def _say_vectors(n_vectors: int) -> str:
    return f"{n_vectors:,} vector{'' if n_vectors == 1 else 's'} of counts"


def _flatten(event: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for inner in event.get("events", ()):
        yield from _flatten(inner)
    if "events" not in event:
        yield event


def _describe_column(name: str, card: Card) -> Content:
    part = card.columns[name]
    told = part.model_extra or {}
    levels, bounds = told.get("levels"), told.get("bounds")
    if levels is not None:
        domain = f"{len(levels):,} levels: {', '.join(map(label_level, levels[:8]))}{', …' if len(levels) > 8 else ''}"
    elif bounds:
        domain = " to ".join(_describe_bound(bound, told.get("numbers")) for bound in bounds)
    else:
        domain = "as it is" if part.role == "kept" else ""
    domain += ", or missing" if told.get("nulls") == "level" and levels is None else ""
    outside = _OUTSIDE.get(part.outside or "", (part.outside or "").replace("other: ", "become "))
    return {
        "name": name,
        "role": part.role,
        "kind": part.kind or "",
        "domain": domain,
        "outside": outside,
        "epsilon": part.epsilon,
    }


def _describe_bound(bound: Any, numbers: str | None) -> str:
    return say_date(bound, numbers) or (
        _say_number(bound) if isinstance(bound, int | float) else str(bound)
    )


def _describe_rows(card: Card, manifest: Manifest, shards: Folder) -> Statistics:
    names = [name for name, part in card.columns.items() if part.role == "privatised"][:MAX_COLUMNS]
    is_tables = find_guidance(card).shape(card) == "tables"
    more = (
        ["table", "count", "margin_95"]
        if is_tables
        else ["weight", *_name_coverages(card).values()]
    )
    sample = read_sample(shards, manifest, [*names, *more])
    found = (
        read_tables(card, sample)[:MAX_COLUMNS] if is_tables else _count_all(names, card, sample)
    )
    pairs = (
        None
        if is_tables
        else associate([name for name in names if name in sample.rows.column_names], sample, card)
    )
    associations: Content | None = None
    if pairs is not None:
        picture = pictures.draw_table(pairs.table, pairs.columns, across="", down="", most=1.0)
        associations = {
            "picture": picture,
            "pairs": pairs.list_strongest(10),
            "n_columns": len(pairs.columns),
        }
    return Statistics(
        histograms=[_describe_histogram(each) for each in found],
        associations=associations,
        narrow=list(_find_narrow(card, sample)),
        n_read=sample.rows.num_rows,
        n_rows=sample.n_rows,
    )


def _name_coverages(card: Card) -> dict[str, str]:
    """Return, by private column, the released column that holds the coverage of its ranges."""
    released = {
        name: (part.model_extra or {}).get("released_as", [])
        for name, part in list(card.columns.items())[:MAX_COLUMNS]
    }
    return {name: made[2] for name, made in released.items() if len(made) == 3}


def _find_narrow(card: Card, sample: Sample) -> Iterator[tuple[str, float]]:
    """Yield columns and the share of their ranges that hold less than a tenth of the values."""
    for name, made in _name_coverages(card).items():
        coverages = sample.rows[made].drop_null().to_numpy()
        if len(coverages):
            yield name, float((coverages < _NARROW).mean())


def _count_all(names: list[str], card: Card, sample: Sample) -> list[ReleasedHistogram]:
    known = [name for name in names if name in sample.rows.column_names]
    counted = (count_histogram(name, sample, card) for name in known)
    return [each for each in counted if each is not None]


def _describe_histogram(histogram: ReleasedHistogram) -> Content:
    widest = max(bar.share for bar in histogram.bars) or 1.0
    bars = [
        (bar.label, bar.share, bar.margin, 100.0 * bar.share / widest) for bar in histogram.bars
    ]
    picture = pictures.draw_histogram(histogram)
    return {
        "column": histogram.column,
        "bars": bars,
        "picture": picture,
        "summary": histogram.summary,
    }


def _describe_channel(view: ChannelView) -> Content:
    across, down = (
        ("released rank", "original rank")
        if view.of_ranks
        else ("released value", "original value")
    )
    picture = pictures.draw_table(
        view.matrix, view.labels, across=across, down=down, most=float(view.matrix.max())
    )
    rows = (
        list(zip(view.labels, view.matrix.tolist(), strict=True))
        if len(view.labels) <= _MOST_CELLS
        else []
    )
    return {
        "column": view.column,
        "labels": view.labels,
        "rows": rows,
        "picture": picture,
        "summary": view.summary,
    }


def _write_snippet(card: Card) -> str:
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
