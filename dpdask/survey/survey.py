"""A survey under interval privacy: questions out, answers in, a release."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from hashlib import blake2b
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from dpdask.codec import Codec, LevelCodec, ValueCodec, codec_for
from dpdask.documents import Document, validate
from dpdask.errors import SpecError
from dpdask.kernels.ranges import Quantiles
from dpdask.mechanisms.card import CoveredContent, make_card
from dpdask.mechanisms.interval.design import (
    Canonical,
    Case1,
    Case2,
    CoverageAnchors,
    Design,
    Progressive,
    Ring,
)
from dpdask.mechanisms.interval.ranges import Narrowing, Partition
from dpdask.mechanisms.interval.release import IntervalRelease, ends_of, to_numbers
from dpdask.mechanisms.interval.spec import TRUE, IntervalSpec, check_designs, interval_section
from dpdask.schema import Schema, arrow_type
from dpdask.streams import RunKey
from dpdask.survey.answers import (
    MAX_ID,
    Answers,
    check_headers,
    choice_ranges,
    form_ranges,
    id_of,
    question_table,
    read_answers,
)
from dpdask.survey.form import ANSWER_FORMAT, Asked, Wording, form

_DAYS = (-719162, 2932896)  # 0001-01-01 and 9999-12-31, in days since 1970
_UNANSWERED = "which questions a respondent left unanswered, a choice that may depend on the value"
_STOPPED = (
    "how soon a respondent stopped, chose tau, or loaded the form anew, which may depend on the value (an early stop shows as a wider range; a "
    "mean_coverage takes everybody to answer every question that was due)"
)
_OF_DRAWN_ANCHORS = ("mean_coverage", "leakage")
_PERSON = b"dpdask survey"


class Wordings(Document):
    """The wording of each column."""

    wording: Mapping[str, Wording]
    """By the column's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Drawn:
    """The checked parameters of a survey; a progressive one has no key."""

    release: IntervalRelease
    declared: Mapping[str, Codec]
    asked: tuple[Asked, ...]
    key: RunKey | None
    id: str


@dataclass(frozen=True, slots=True)
class Survey:
    """Asks people which range a value lies in, and releases their answers.

    Parameters
    ----------
    schema
        The columns to ask for, all of role `privatise`: numbers or dates. Declare `type: int64` (or
        `date32`) where values are whole; the anchors are then whole too. Public columns are joined
        to the release by respondent.
    columns
        The design of each, as of `dpdask.IntervalMechanism`: all of them `case1`, `case2`,
        `canonical` or `ring`, whose questions are drawn beforehand, or all `progressive` (with
        `stop: either`), asked round by round by a form. None may hold nulls: a respondent who does
        not answer has the range (-inf, inf).
    wording
        The wording of each question: a `Wording`, or a mapping that makes one.
    key
        The key of the questions drawn beforehand; the same key gives the same questions. Answers
        are ingested with the key that asked, and refused with any other, because `id` depends on
        it. None: a new one, of this object alone. To ingest in another process, keep the 32 bytes
        of `RunKey.fresh().reveal()` in a file that only you can read, and give
        `RunKey(path.read_bytes())`. A progressive survey has none: its forms draw in the
        respondents' browsers.
    insecure_seed
        A seed of the key, for tests.

    Raises
    ------
    SpecError
        If a parameter is invalid, a design cannot be asked or does not fit its column, or no
        rounded anchor says anything.

    Privacy
    -------
    Unit: a value. There is no ε. Only the respondent holds the value: anchors are drawn before any
    question (by a form, in the respondent's own browser, from its secure source). Protected: the
    place of the value inside the released range. Not protected: that the value lies in the range,
    if the respondent tells the truth, and the respondent's own decisions: whether to answer, and in
    a form when to stop and, with `own_tau`, at what coverage. The range stays true whenever they
    stop, but a decision that depends on the value reveals more than the range, and biases estimates
    from all ranges. Without such decisions a form's range has the distribution of the progressive
    mechanism (with `decimals`, of rounded anchors). A form draws its questions when it is loaded:
    an answer that is taken back and given again brings the same question, but a page that is loaded
    anew draws new ones, among which a respondent could choose. Somebody asked twice (another
    survey, another key, a second file) gives two ranges, whose intersection is narrower. The id is
    public and a keyed digest. It reveals nothing of a 256-bit key, but a guessed seed can be
    checked against it.

    References
    ----------
    Ding and Ding, Interval privacy: a framework for privacy-preserving data collection, Fig. 6,
    Example 4, section IV-C.

    Examples
    --------
    >>> import dpdask
    >>> schema = dpdask.Schema.from_dict({"columns": {"income": {"role": "privatise", "kind": "continuous", "type": "int64"}}})
    >>> anchors = {"name": "uniform", "loc": 0, "scale": 150_000}
    >>> wording = {"income": {"of": "your yearly income before tax", "unit": "euro"}}
    >>> survey = dpdask.Survey(schema, columns={"income": {"design": "case1", "anchors": anchors}}, wording=wording, insecure_seed=1)
    >>> asked = survey.questions(2)
    >>> answers = [{"survey": survey.id, "respondent": "1", "income_choice": 2}, {"survey": survey.id, "respondent": "2", "income_choice": 1}]
    >>> list(survey.ingest(answers).columns)
    ['respondent', 'income_lower', 'income_upper']
    """

    schema: Schema
    _: KW_ONLY
    columns: Mapping[str, Design | Mapping[str, Any]]
    wording: Mapping[str, Wording | Mapping[str, Any]]
    key: RunKey | None = field(default=None, repr=False)
    insecure_seed: int | None = None
    _drawn: _Drawn = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.schema.privatised or self.schema.kept:
            raise SpecError(
                "a survey asks for private columns alone",
                "Survey",
                "join public columns to its release by respondent",
            )
        designs = validate(IntervalSpec, {"columns": dict(self.columns)}, "Survey").columns
        wording = validate(Wordings, {"wording": dict(self.wording)}, "Survey").wording
        check_askable(self.schema, designs, wording)
        check_designs(self.schema, designs)
        names = self.schema.privatised
        declared = {
            name: codec for name in names if (codec := _codec(self.schema, name)) is not None
        }
        codecs = {
            name: declared.get(name)
            or codec_for(name, self.schema.columns[name], arrow_type("float64"))
            for name in names
        }
        release = IntervalRelease.of({name: designs[name] for name in names}, codecs)
        asked = tuple(_ask(name, wording[name], release, codecs[name]) for name in names)
        for each in asked:
            check_decimals(
                each,
                designs[each.name],
                is_continuous=self.schema.columns[each.name].kind == "continuous",
            )
        key = _key(
            self.key, self.insecure_seed, is_progressive=isinstance(asked[0].step, Narrowing)
        )
        texts = {name: text.model_dump() for name, text in wording.items()}
        kinds = {name: self.schema.columns[name].model_dump(mode="json") for name in names}
        documents = {name: designs[name].model_dump(exclude_none=True) for name in names}
        what = json.dumps([ANSWER_FORMAT, documents, texts, kinds], sort_keys=True)
        id_ = blake2b(
            what.encode(), digest_size=8, person=_PERSON, key=b"" if key is None else key.reveal()
        ).hexdigest()
        object.__setattr__(
            self, "_drawn", _Drawn(release=release, declared=declared, asked=asked, key=key, id=id_)
        )

    @property
    def id(self) -> str:
        """The survey's id, which answers carry: a digest of columns, designs and wording, keyed by the key of questions drawn beforehand."""
        return self._drawn.id

    @property
    def is_progressive(self) -> bool:
        """Whether questions follow from answers, so that a form must ask them."""
        return self._drawn.key is None

    @property
    def card(self) -> dict[str, Any]:
        """The release card: what ranges reveal, as in `IntervalMechanism.card`, and what respondents' own decisions may reveal."""
        drawn = self._drawn
        section = interval_section(release=drawn.release, schema=self.schema, codecs=drawn.declared)
        more = _STOPPED if self.is_progressive else _UNANSWERED
        assert isinstance(section.unprotected, CoveredContent)
        coarser = {
            asked.name: _coarser_column(section.columns[asked.name], asked)
            for asked in drawn.asked
            if asked.is_coarser
        }
        section = replace(
            section,
            unprotected=CoveredContent(what=f"{section.unprotected.what}; {more}"),
            text=section.text.replace(TRUE, "")  # a mechanism promises this, but a survey cannot
            + f" Not protected either: {more}. All of this holds as far as respondents answer truthfully, each of them once.",
            mechanism={
                **section.mechanism,
                "true_of_every_row": False,
            },  # people answered, so it cannot be known
            columns={**section.columns, **coarser},
            order="rows keep the order in which answers were ingested, which is public, as are respondents' ids",
        )
        wording = {asked.name: asked.wording.model_dump(exclude_none=True) for asked in drawn.asked}
        survey = {
            "id": self.id,
            "format": ANSWER_FORMAT,
            "progressive": self.is_progressive,
            "wording": wording,
        }
        card = make_card(section, name="survey", insecure=self.insecure_seed is not None)
        assert card.terms is not None
        terms = card.terms.model_copy(update={"trust_model": "local"})
        return card.model_copy(update={"survey": survey, "terms": terms}).to_dict()

    def questions(self, respondents: int | Sequence[str | int]) -> pd.DataFrame:
        """Return the questions of respondents, drawn beforehand.

        Parameters
        ----------
        respondents
            Their ids, distinct; or how many there are, for the ids "1", "2", ….

        Returns
        -------
        A row per respondent and column: `survey` (its id), `respondent`, `column`, `question` and
        `choices` (texts; an answer is the number of a choice, counted from 1), `anchors` (numbers,
        sorted). A respondent's row is a function of the key, the survey and the id alone. Whoever
        answers "please give it" gives the number too.

        Raises
        ------
        SpecError
            If the survey is progressive, or an id appears twice or is invalid.
        """
        if self._drawn.key is None:
            raise SpecError(
                "a progressive design's questions follow from the answers",
                "questions",
                "give every respondent the form",
            )
        ids = [
            id_of(each)
            for each in (range(1, respondents + 1) if isinstance(respondents, int) else respondents)
        ]
        return question_table(self._drawn.asked, self.id, check_ids(ids), self._drawn.key)

    def form(
        self,
        *,
        title: str,
        introduction: str = "",
        respondent: str | None = None,
        own_tau: bool = False,
    ) -> str:
        """Return the form of a progressive survey: one HTML file that needs, loads and sends nothing.

        Anchors are drawn in the browser by the mechanism's own distribution, all of them when the
        page is loaded: loading it again draws anew. Respondents may stop before any question, see
        what they have told so far, and take an answer back, which draws nothing; at the end they
        save a file of the final ranges alone.

        Parameters
        ----------
        title, introduction
            Plain texts.
        respondent
            An id that the answer will carry, so that public columns can be joined to it; such a
            file is not anonymous.
        own_tau
            Whether respondents choose the least coverage of their ranges, before the first
            question, instead of one that is drawn by the design; not below the least that the
            design allows.

        Raises
        ------
        SpecError
            If the survey is not progressive, or a reference has too many values for a page.
        """
        if not self.is_progressive:
            raise SpecError(
                "only a progressive design needs a form", "form", "ask the rows of `questions`"
            )
        if respondent is not None:
            check_ids([id_of(respondent)])
        return form(
            self._drawn.asked,
            self.id,
            title=title,
            introduction=introduction,
            respondent=respondent,
            own_tau=own_tau,
        )

    def ingest(self, answers: Answers | pd.DataFrame) -> pd.DataFrame:
        """Return the release of some answers: `npmle` and `IntervalRegressor` take its ranges as a mechanism's.

        Parameters
        ----------
        answers
            For a form, the files that it saved. For questions, a mapping or row per respondent with
            `survey`, `respondent`, `<column>_choice` (from 1; missing where unanswered) and, where
            the choice asks for the number, `<column>_value`. Paths of JSON or CSV files, their
            bytes, mappings, lists of these, or a frame.

        Returns
        -------
        A row per answer, in their order: `respondent` if any answer has an id, and float64
        `<column>_lower` and `<column>_upper`, as the card's convention says; (-inf, inf) for an
        unanswered question.

        Raises
        ------
        DataError
            If an answer is not to this survey or its key, or is none that its respondent could have
            given; if two are of one respondent.
        InputError
            If a file cannot be read.
        """
        found, asked = read_answers(answers), self._drawn.asked
        if self._drawn.key is None:
            keys = [end for each in asked for end in ends_of(each.name)]
            respondents = check_headers(found, self.id, keys, keys)
            ranges = [form_ranges(found, each) for each in asked]
        else:
            keys = [f"{each.name}_{part}" for each in asked for part in ("choice", "value")]
            respondents = check_headers(found, self.id, keys, ["respondent"])
            ranges = [
                choice_ranges(
                    found, [str(each) for each in respondents], each, self.id, self._drawn.key
                )
                for each in asked
            ]
        whose = (
            {"respondent": pd.Series(respondents, dtype="str")}
            if any(each is not None for each in respondents)
            else {}
        )
        ends = {
            name: end
            for each, pair in zip(asked, ranges, strict=True)
            for name, end in zip(ends_of(each.name), pair, strict=True)
        }
        return pd.DataFrame({**whose, **ends})


def check_askable(
    schema: Schema, designs: Mapping[str, Design], wording: Mapping[str, Wording]
) -> None:
    """Check that columns and designs can be asked in one way, and have a wording.

    Parameters
    ----------
    schema
        The columns.
    designs, wording
        The design and the wording of each.

    Raises
    ------
    SpecError
        If they cannot.
    """
    for name, design in designs.items():
        if name not in schema.privatised:
            continue  # `check_designs` refuses it
        where = f"columns.{name}"
        if design.nulls == "public" or schema.columns[name].nulls == "level":
            what = "a survey has no nulls: whoever does not answer has the range (-inf, inf)"
            raise SpecError(what, where, "leave `nulls` out, of the schema and of the design")
        if not isinstance(design, Case1 | Case2 | Canonical | Ring | Progressive):
            raise SpecError(
                "this design cannot be asked",
                where,
                "use the design case1, case2, canonical, ring or progressive",
            )
        if isinstance(design, Progressive) and design.stop != "either":
            raise SpecError(
                "with this stop rule, a respondent's stop reveals more than the range",
                where,
                "use `stop: either`",
            )
        if isinstance(design, Progressive) != isinstance(next(iter(designs.values())), Progressive):
            raise SpecError(
                "a survey is progressive in all columns or in none", where, "make two surveys"
            )
        if name not in wording:
            raise SpecError("it has no wording", where, "add it to `wording`, at least `of`")
    extra = next((name for name in wording if name not in designs), None)
    if extra is not None:
        raise SpecError(
            "is not asked for", f"wording.{extra}", "remove it, or give the column a design"
        )


def check_decimals(asked: Asked, design: Design, *, is_continuous: bool) -> None:
    """Check that anchors may be shown rounded: no coverage is promised, and rounded anchors are still informative.

    Parameters
    ----------
    asked, design
        The column and its design.
    is_continuous
        Whether its least value, like any other, has no probability of its own, so that an anchor on
        it says nothing.

    Raises
    ------
    SpecError
        If they may not.
    """
    where = f"wording.{asked.name}.decimals"
    if not asked.is_coarser:
        return
    if getattr(design, "at_least", None) is not None or isinstance(
        getattr(design, "anchors", None), CoverageAnchors
    ):
        raise SpecError(
            "rounded anchors need not have the coverage that is asked for",
            where,
            "leave it out, or give anchors",
        )
    low, high = asked.bounds
    if not asked.tells_apart(low if is_continuous else math.nextafter(low, -math.inf), high):
        what = "no anchor that is rounded down falls between its least and greatest value, so its ranges would carry no information"
        raise SpecError(what, where, "choose more decimals, or anchors that reach where values are")


def _key(key: RunKey | None, seed: int | None, *, is_progressive: bool) -> RunKey | None:
    """Return the key of questions drawn beforehand."""
    if is_progressive and not (key is None and seed is None):
        raise SpecError(
            "a progressive survey has no key: its forms draw in the respondents' browsers",
            "Survey",
            "leave key and insecure_seed out",
        )
    if key is not None and seed is not None:
        raise SpecError("`key` and `insecure_seed` are both given", "Survey", "give one of them")
    if is_progressive or key is not None:
        return key
    return RunKey.fresh() if seed is None else RunKey.insecure(seed)


def _codec(schema: Schema, name: str) -> Codec | None:
    type_ = schema.columns[name].type
    return None if type_ is None else codec_for(name, schema.columns[name], arrow_type(type_))


def _ask(name: str, wording: Wording, release: IntervalRelease, codec: Codec) -> Asked:
    step, where = release.columns[name].step, f"column {name!r}"
    assert isinstance(step, Partition | Narrowing)
    type_ = codec.levels.type if isinstance(codec, LevelCodec) else codec.type
    if pa.types.is_timestamp(type_):
        raise SpecError("people are asked for numbers and dates", where, "declare the type date32")
    if step.lattice and wording.decimals:
        raise SpecError(
            "its anchors are whole",
            f"wording.{name}.decimals",
            "leave it out, or declare the type float64",
        )
    is_date = bool(pa.types.is_date(type_))
    centres = step.centres if isinstance(step, Partition) else np.zeros(1)
    if is_date and not _are_days(step.distribution, centres):
        raise SpecError(
            "an anchor may be no date of the years 1 to 9999",
            where,
            "give anchors in days since 1970, not so wide",
        )
    levels = (
        np.sort(to_numbers(codec, codec.levels)[0])
        if isinstance(codec, LevelCodec)
        else np.zeros(0)
    )
    bounds = (
        codec.bounds or (-math.inf, math.inf)
        if isinstance(codec, ValueCodec)
        else (float(levels[0]), float(levels[-1]))
    )
    return Asked(
        name=name, wording=wording, step=step, is_date=is_date, bounds=bounds, levels=levels
    )


def _coarser_column(column: Mapping[str, Any], asked: Asked) -> dict[str, Any]:
    """Return a column's part of the card without the figures of the anchors as drawn, because coarser ones were shown."""
    figures = {key: value for key, value in column.items() if key not in _OF_DRAWN_ANCHORS}
    return figures | {
        "anchors": f"rounded down to {asked.decimals} decimals before they were shown; no coverage is stated"
    }


def _are_days(distribution: Quantiles, centres: np.ndarray) -> bool:
    return bool(
        _DAYS[0] <= distribution.x[0] + centres.min()
        and distribution.x[-1] + centres.max() <= _DAYS[1]
    )


def check_ids(ids: Sequence[str | None]) -> list[str]:
    """Return respondents' ids.

    Raises
    ------
    SpecError
        If an id appears twice, or is None, which no answer can carry.
    """
    found = [each for each in ids if each is not None]
    if len(set(found)) < len(ids):
        what = f"a respondent's id is repeated, empty, or not a UTF-8 text of up to {MAX_ID} characters"
        raise SpecError(what, "respondents", "give every respondent an id")
    return found
