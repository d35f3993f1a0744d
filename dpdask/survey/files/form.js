"use strict";

// The narrowing of dpdask.kernels.ranges, in the respondent's browser: the same tables, the same arithmetic on doubles.
const narrowing = (() => {
  const N_CELLS = 2 ** 14, N_TAIL = 40, UNIT = 2 ** -53;
  const tail = Array.from({ length: N_TAIL }, (_, j) => 2 ** (j - 54));
  const LEVELS = Float64Array.from([
    ...tail, ...Array.from({ length: N_CELLS - 1 }, (_, k) => (k + 1) / N_CELLS), ...tail.slice(1).reverse().map((p) => 1 - p),
  ]);

  // 53 random bits of the operating system, as a number in (0, 1]
  const secure = () => {
    const [a, b] = crypto.getRandomValues(new Uint32Array(2));
    return ((a >>> 5) * 2 ** 26 + (b >>> 6) + 0.5) * UNIT;
  };

  const numbers = (text) => {
    const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
    const view = new DataView(bytes.buffer);
    return Float64Array.from({ length: bytes.length / 8 }, (_, i) => view.getFloat64(8 * i, true));
  };

  const column = (data) => ({
    ...data, law: numbers(data.law), tau: numbers(data.tau),
    cdf: {
      x: numbers(data.cdf.x),
      low: data.cdf.low ? numbers(data.cdf.low) : Float64Array.from([0, ...LEVELS]),
      high: data.cdf.high ? numbers(data.cdf.high) : Float64Array.from([...LEVELS, 1]),
    },
  });

  // the index of the first of sorted numbers that `found` says yes to, as it does to all after it
  const first = (sorted, found) => {
    let low = 0, high = sorted.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (found(sorted[middle])) high = middle; else low = middle + 1;
    }
    return low;
  };

  const quantile = (share, x) => {
    if (x.length === 2) return x[0] + Math.min(share, 1) * (x[1] - x[0]);
    const cell = Math.floor(share * N_CELLS);
    let i, place;
    if (cell > 0 && cell < N_CELLS - 1) {
      i = N_TAIL - 1 + cell;
      place = share * N_CELLS - cell;
    } else {
      i = Math.min(Math.max(first(LEVELS, (p) => p > share) - 1, 0), LEVELS.length - 2);
      place = Math.min((share - LEVELS[i]) / (LEVELS[i + 1] - LEVELS[i]), 1);
    }
    return Math.min(x[i] + place * (x[i + 1] - x[i]), x[i + 1]);
  };

  const rounded = (anchor, decimals) => (decimals === null ? anchor : Math.floor(anchor * 10 ** decimals) / 10 ** decimals + 0);

  // one share for tau and one for each round, all drawn before the first question: answers that are the same have the same questions
  const draw = (asked) => Array.from({ length: 1 + asked.rounds }, secure);

  // low, high: the range; first, last: the anchors' ranks at its ends; least, most: bounds on the reference's cdf there
  const start = (tau, shares) => ({ low: -Infinity, high: Infinity, first: 0, last: 1, least: 0, most: 1, turn: 0, tau, shares });

  // the next anchor, or null if either answer to it would leave less than tau: then nothing is asked
  const propose = (asked, state) => {
    if (state.turn === asked.rounds) return null;
    const rank = state.first + state.shares[1 + state.turn] * (state.last - state.first);
    const anchor = rounded(quantile(rank, asked.law), asked.decimals);
    if (!(state.low < anchor && anchor < state.high)) return null;
    const cell = first(asked.cdf.x, (knot) => knot >= anchor);
    const below = asked.cdf.low[cell], above = asked.cdf.high[cell];
    return Math.min(below - state.least, state.most - above) < state.tau ? null : { anchor, rank, below, above };
  };

  const answer = (state, asked, atMost) => ({
    ...state, turn: state.turn + 1,
    ...(atMost ? { high: asked.anchor, last: asked.rank, most: asked.below } : { low: asked.anchor, first: asked.rank, least: asked.above }),
  });

  return Object.freeze({ secure, draw, column, quantile, start, propose, answer });
})();

(() => {
  const survey = JSON.parse(document.getElementById("survey").textContent);
  const columns = survey.columns.map(narrowing.column);
  const at = (id) => document.getElementById(id);
  const show = (id) => ["choose", "ask", "done"].forEach((other) => { at(other).hidden = other !== id; });

  const number = (asked, x) => {
    if (asked.isDate) return new Date(x * 86400000).toISOString().slice(0, 10);
    const [, sign, whole, rest] = /^(-?)(\d+)(.*)$/.exec(String(x));
    return `${sign}${whole.replace(/\B(?=(\d{3})+$)/g, ",")}${rest} ${asked.unit}`.trim();
  };
  const more = (asked, x) => `${asked.isDate ? "after" : "more than"} ${number(asked, x)}`;
  const atMost = (asked, x) => `${asked.isDate ? "on or before" : "at most"} ${number(asked, x)}`;
  const range = (asked, { low, high }) => {
    const parts = [...(low > -Infinity ? [more(asked, low)] : []), ...(high < Infinity ? [atMost(asked, high)] : [])];
    return parts.length ? parts.join(" and ") : "anything";
  };
  const coverage = ({ least, most }) => (least === 0 && most === 1 ? "everybody" : `at least ${Math.floor(100 * (most - least))} of 100 people`);
  const known = (asked, state) => `${range(asked, state)} (a range of ${coverage(state)}, as this survey expects)`;

  // every answer leaves one record here: to take it back is to go back to the question as it stood
  let history = [], states = [], current = 0, question = null;

  const next = () => {
    while (current < columns.length) {
      question = narrowing.propose(columns[current], states[current]);
      if (question) return ask();
      current += 1;
    }
    return finish();
  };

  const ask = () => {
    const asked = columns[current];
    at("progress").textContent = `Question on ${current + 1} of ${columns.length}: ${asked.of}`;
    at("question").textContent = `Is ${asked.of} ${atMost(asked, question.anchor)}?`;
    at("at-most").textContent = `Yes, ${atMost(asked, question.anchor)}`;
    at("more").textContent = `No, ${more(asked, question.anchor)}`;
    at("known").textContent = `So far it may be ${known(asked, states[current])}.`;
    at("undo").hidden = !history.length;
    show("ask");
    at("question").focus();
  };

  const finish = () => {
    at("summary").replaceChildren(...columns.map((asked, i) => {
      const item = document.createElement("li");
      item.textContent = `${asked.of}: ${known(asked, states[i])}`;
      return item;
    }));
    at("file").textContent = file();
    at("saved").textContent = "";
    at("back").hidden = !history.length;
    show("done");
    at("done-title").focus();
  };

  const file = () => {
    const end = (x) => (x === Infinity ? "inf" : x === -Infinity ? "-inf" : x);
    const ranges = columns.flatMap((asked, i) => [[`${asked.name}_lower`, end(states[i].low)], [`${asked.name}_upper`, end(states[i].high)]]);
    const whose = survey.respondent === null ? {} : { respondent: survey.respondent };
    return JSON.stringify({ format: survey.format, survey: survey.survey, ...whose, convention: survey.convention, ...Object.fromEntries(ranges) }, null, 1);
  };

  const record = () => { history.push({ states: [...states], current, question }); };
  const given = (isAtMost) => {
    record();
    states[current] = narrowing.answer(states[current], question, isAtMost);
    next();
  };
  const undo = () => {
    ({ states, current, question } = history.pop());
    ask();
  };
  const stop = () => {
    record();
    current += 1;
    next();
  };
  const save = () => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([`${file()}\n`], { type: "application/json" }));
    link.download = `survey-${survey.survey}.json`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60000);
    at("saved").textContent = "Saved.";
  };

  const begin = (tauOf) => {
    states = columns.map((asked) => {
      const shares = narrowing.draw(asked);
      return narrowing.start(tauOf(asked, shares[0]), shares);
    });
    next();
  };
  const least = Math.ceil(100 * Math.max(...columns.map((asked) => asked.leastTau)));
  const chosen = () => {
    const share = at("least").valueAsNumber;
    const isWrong = !(share >= least && share <= 100);
    at("least-wrong").hidden = !isWrong;
    at("least-wrong").textContent = isWrong ? `Please give a number from ${least} to 100.` : "";
    if (!isWrong) begin(() => share / 100);
  };

  for (const [id, act] of [["at-most", () => given(true)], ["more", () => given(false)], ["stop", stop], ["undo", undo], ["back", undo], ["save", save], ["begin", chosen]]) {
    at(id).addEventListener("click", act);
  }
  if (survey.ownTau) {
    at("least").min = String(least);
    at("least").value = String(Math.max(least, 20));
    show("choose");
  } else {
    begin((asked, first) => narrowing.quantile(first, asked.tau));
  }
})();
