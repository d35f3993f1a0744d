"""A survey under interval privacy: questions out, answers in, a release."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from hashlib import blake2b

import numpy as np
import pandas as pd
import pyarrow as pa

from dpdask.archive import Json, Named
from dpdask.codec import Codec, Codecs, codec_for
from dpdask.documents import Document, validate
from dpdask.errors import SpecError
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
from dpdask.mechanisms.interval.spec import IntervalSpec, check_designs, interval_section
from dpdask.schema import Schema, arrow_type
from dpdask.streams import RunKey
from dpdask.survey.questions import (
    ANSWER_FORMAT,
    CONVENTION,
    MAX_ID,
    Answers,
    Question,
    Wording,
    check_headers,
    id_of,
    read_answers,
    read_choices,
    read_form_ranges,
    render_form,
)

_FIRST_DAY, _LAST_DAY = -719162, 2932896  # 0001-01-01 and 9999-12-31, in days since 1970
_UNANSWERED = "which questions a respondent left unanswered, a choice that may depend on the value"
_STOPPED = (
    "how soon a respondent stopped, chose tau, or loaded the form anew, which may depend on the value (an early stop shows as a wider range; a "
    "mean_coverage takes everybody to answer every question that was due)"
)


class Wordings(Document):
    """The wording of each column."""

    wording: Mapping[str, Wording]
    """By the column's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Drawn:
    """The checked parameters of a survey; a progressive one has no key."""

    release: IntervalRelease
    declared: Codecs
    questions: tuple[Question, ...]
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
    columns: Mapping[str, Design | Named]
    wording: Mapping[str, Wording | Named]
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
        _check_askable(self.schema, designs, wording)
        check_designs(self.schema, designs)
        names, columns = self.schema.privatised, self.schema.columns
        types = {name: columns[name].type for name in names}
        declared = {
            name: codec_for(name, columns[name], arrow_type(type_))
            for name, type_ in types.items()
            if type_ is not None
        }
        codecs = {
            name: declared.get(name) or codec_for(name, columns[name], arrow_type("float64"))
            for name in names
        }
        release = IntervalRelease.of({name: designs[name] for name in names}, codecs)
        questions = tuple(_ask(name, wording[name], release, codecs[name]) for name in names)
        for question in questions:
            is_continuous = columns[question.name].kind == "continuous"
            _check_decimals(question, designs[question.name], is_continuous=is_continuous)
        is_progressive = isinstance(questions[0].step, Narrowing)
        key = _make_key(self.key, self.insecure_seed, is_progressive=is_progressive)
        public = [
            ANSWER_FORMAT,
            {name: designs[name].model_dump(exclude_none=True) for name in names},
            {name: text.model_dump() for name, text in wording.items()},
            {name: columns[name].model_dump(mode="json") for name in names},
        ]
        secret = b"" if key is None else key.reveal()
        content = json.dumps(public, sort_keys=True).encode()
        id_ = blake2b(content, digest_size=8, person=b"dpdask survey", key=secret).hexdigest()
        drawn = _Drawn(release=release, declared=declared, questions=questions, key=key, id=id_)
        object.__setattr__(self, "_drawn", drawn)

    @property
    def id(self) -> str:
        """The survey's id, which answers carry: a digest of columns, designs and wording, keyed by the key of questions drawn beforehand."""
        return self._drawn.id

    @property
    def is_progressive(self) -> bool:
        """Whether questions follow from answers, so that a form must ask them."""
        return self._drawn.key is None

    @property
    def card(self) -> Json:
        """The release card: what ranges reveal, as in `IntervalMechanism.card`, and what respondents' own decisions may reveal."""
        drawn = self._drawn
        # a mechanism promises that ranges are true, but a survey cannot
        section = interval_section(
            release=drawn.release, schema=self.schema, codecs=drawn.declared, true=""
        )
        more = _STOPPED if self.is_progressive else _UNANSWERED
        assert isinstance(section.unprotected, CoveredContent)
        columns = dict(section.columns)
        for question in drawn.questions:
            # the figures are of the anchors as drawn, and others were shown
            if question.is_coarser:
                figures = {**columns[question.name]}
                figures.pop("mean_coverage", None)
                figures.pop("leakage", None)
                rounded = f"rounded down to {question.decimals} decimals before they were shown"
                columns[question.name] = figures | {"anchors": f"{rounded}; no coverage is stated"}
        section = replace(
            section,
            unprotected=CoveredContent(what=f"{section.unprotected.what}; {more}"),
            text=f"{section.text} Not protected either: {more}. All of this"
            " holds as far as respondents answer truthfully, each of them once.",
            mechanism={**section.mechanism, "true_of_every_row": False},
            columns=columns,
            order="rows keep the order in which answers were ingested, which is public, as are"
            " respondents' ids",
        )
        survey = {
            "id": self.id,
            "format": ANSWER_FORMAT,
            "progressive": self.is_progressive,
            "wording": {
                question.name: question.wording.model_dump(exclude_none=True)
                for question in drawn.questions
            },
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
        key = self._drawn.key
        if key is None:
            what = "a progressive design's questions follow from the answers"
            raise SpecError(what, "questions", "give every respondent the form")
        if isinstance(respondents, int):
            respondents = range(1, respondents + 1)
        ids = _check_ids(respondents)
        drawn = {
            question.name: question.draw_anchors(self.id, ids, key)
            for question in self._drawn.questions
        }
        rows = [
            (self.id, id_, question.name, *question.ask(anchors), anchors.tolist())
            for row, id_ in enumerate(ids)
            for question in self._drawn.questions
            for anchors in [drawn[question.name][row]]
        ]
        names = ["survey", "respondent", "column", "question", "choices", "anchors"]
        return pd.DataFrame(rows, columns=names)

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
            what = "only a progressive design needs a form"
            raise SpecError(what, "form", "ask the rows of `questions`")
        if respondent is not None:
            _check_ids([respondent])
        data = {
            "format": ANSWER_FORMAT,
            "survey": self.id,
            "respondent": respondent,
            "convention": CONVENTION,
            "ownTau": own_tau,
            "columns": [question.to_page() for question in self._drawn.questions],
        }
        return render_form(data, title, introduction)

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
        read, questions, key = read_answers(answers), self._drawn.questions, self._drawn.key
        if key is None:
            keys = [end for question in questions for end in ends_of(question.name)]
            respondents = check_headers(read, self.id, keys, keys)
            ranges = [read_form_ranges(read, question) for question in questions]
        else:
            keys = [f"{each.name}_{part}" for each in questions for part in ("choice", "value")]
            respondents = check_headers(read, self.id, keys, ["respondent"])
            ids = list(map(str, respondents))
            ranges = [read_choices(read, ids, question, self.id, key) for question in questions]
        columns: Json = {}
        if any(each is not None for each in respondents):
            columns["respondent"] = pd.Series(respondents, dtype="str")
        for question, pair in zip(questions, ranges, strict=True):
            columns |= zip(ends_of(question.name), pair, strict=True)
        return pd.DataFrame(columns)


def _check_askable(
    schema: Schema, designs: Mapping[str, Design], wording: Mapping[str, Wording]
) -> None:
    """Check that columns and designs can be asked in one way, and have a wording."""
    first = next(iter(designs.values()))
    for name, design in designs.items():
        if name not in schema.privatised:
            continue  # `check_designs` refuses it
        is_progressive = isinstance(design, Progressive)
        for is_wrong, what, hint in (
            (
                design.nulls == "public" or schema.columns[name].nulls == "level",
                "a survey has no nulls: whoever does not answer has the range (-inf, inf)",
                "leave `nulls` out, of the schema and of the design",
            ),
            (
                not isinstance(design, Case1 | Case2 | Canonical | Ring | Progressive),
                "this design cannot be asked",
                "use the design case1, case2, canonical, ring or progressive",
            ),
            (
                isinstance(design, Progressive) and design.stop != "either",
                "with this stop rule, a respondent's stop reveals more than the range",
                "use `stop: either`",
            ),
            (
                is_progressive != isinstance(first, Progressive),
                "a survey is progressive in all columns or in none",
                "make two surveys",
            ),
            (name not in wording, "it has no wording", "add it to `wording`, at least `of`"),
        ):
            if is_wrong:
                raise SpecError(what, f"columns.{name}", hint)
    for name in set(wording) - set(designs):
        hint = "remove it, or give the column a design"
        raise SpecError("is not asked for", f"wording.{name}", hint)


def _check_decimals(question: Question, design: Design, *, is_continuous: bool) -> None:
    """Check that anchors may be shown rounded: no coverage is promised, and they still say something.

    The least value of a continuous column, like any other, has no probability of its own, so an
    anchor on it says nothing.
    """
    if not question.is_coarser:
        return
    where = f"wording.{question.name}.decimals"
    is_covering = isinstance(getattr(design, "anchors", None), CoverageAnchors)
    if getattr(design, "at_least", None) is not None or is_covering:
        what = "rounded anchors need not have the coverage that is asked for"
        raise SpecError(what, where, "leave it out, or give anchors")
    low, high = question.bounds
    if not question.tells_apart(low if is_continuous else math.nextafter(low, -math.inf), high):
        what = (
            "no anchor that is rounded down falls between its least and greatest value, so its"
            " ranges would carry no information"
        )
        raise SpecError(what, where, "choose more decimals, or anchors that reach where values are")


def _make_key(key: RunKey | None, seed: int | None, *, is_progressive: bool) -> RunKey | None:
    """Return the key of questions drawn beforehand."""
    if key is not None and seed is not None and not is_progressive:
        raise SpecError("`key` and `insecure_seed` are both given", "Survey", "give one of them")
    if not is_progressive:
        return key or (RunKey.fresh() if seed is None else RunKey.insecure(seed))
    if key is not None or seed is not None:
        what = "a progressive survey has no key: its forms draw in the respondents' browsers"
        raise SpecError(what, "Survey", "leave key and insecure_seed out")
    return None


def _ask(name: str, wording: Wording, release: IntervalRelease, codec: Codec) -> Question:
    step, where = release.columns[name].step, f"column {name!r}"
    assert isinstance(step, Partition | Narrowing)
    if codec.has_levels:
        type_, levels = codec.levels.type, np.sort(to_numbers(codec, codec.levels)[0])
        bounds = (float(levels[0]), float(levels[-1]))
    else:
        type_, levels = codec.type, np.zeros(0)
        bounds = codec.bounds or (-math.inf, math.inf)
    if pa.types.is_timestamp(type_):
        raise SpecError("people are asked for numbers and dates", where, "declare the type date32")
    if codec.unit is not None:
        raise SpecError("answers are taken as they are", where, "leave `unit` out")
    if step.lattice and wording.decimals:
        hint = "leave it out, or declare the type float64"
        raise SpecError("its anchors are whole", f"wording.{name}.decimals", hint)
    is_date, x = bool(pa.types.is_date(type_)), step.distribution.x
    centres = step.centres if isinstance(step, Partition) else np.zeros(1)
    first, last = x[0] + centres.min(), x[-1] + centres.max()
    if is_date and not (first >= _FIRST_DAY and last <= _LAST_DAY):
        hint = "give anchors in days since 1970, not so wide"
        raise SpecError("an anchor may be no date of the years 1 to 9999", where, hint)
    return Question(
        name=name, wording=wording, step=step, is_date=is_date, bounds=bounds, levels=levels
    )


def _check_ids(respondents: Sequence[object]) -> list[str]:
    """Return respondents' ids, after a check that an answer can carry each, and none twice."""
    ids = {id_ for respondent in respondents if (id_ := id_of(respondent)) is not None}
    if len(ids) < len(respondents):
        what = f"a respondent's id is repeated, empty, or not a UTF-8 text of up to {MAX_ID} characters"
        raise SpecError(what, "respondents", "give every respondent an id")
    return [str(respondent) for respondent in respondents]
