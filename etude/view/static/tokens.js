// The exact tokens of one turn, coloured by one signal.

import { Legend, useQuery, Waiting } from "./base.js";
import { number, visible } from "./text.js";
import { html, useEffect, useMemo, useRef, useState } from "./vendor/preact-htm.js";

const BLOCK = 200;
const LONG_PROMPT = 600;
const LEVELS = [0.05, 0.3, 0.7, 1.4, 2.3, 4];
const COLOURS = 8;
const MOST_LISTED = 12;
const MOST_TINT = 40;
const REPLAYED = ["advantage", "weight", "state", "ratio", "start_logp", "entropy", "kl"];
const FACTS = { weight: "contribution", start_logp: "trainer's log-prob", kl: "KL" };
const STATES = [
  ["in the loss", "series-1"],
  ["clipped", "series-2"],
  ["masked", "series-3"],
  ["advantage 0", "series-4"],
  ["not in the replay", "faint"],
  ["sampled", "series-1"],
];
const SIZES = [
  [1, "the only one"],
  [10, "up to 10"],
  [100, "up to 100"],
  [Number.POSITIVE_INFINITY, "more than 100"],
];
const TYPES = { int32: Int32Array, float32: Float32Array, uint8: Uint8Array };

/** The columns of a reply: `head`, and an array by name. */
function unpack(bytes) {
  const size = new DataView(bytes).getUint32(0, true);
  const { columns, ...head } = JSON.parse(new TextDecoder().decode(new Uint8Array(bytes, 4, size)));
  const arrays = Object.entries(columns).map(([name, { type, offset, count }]) => [
    name,
    new TYPES[type](bytes, 4 + size + offset, count),
  ]);
  return { head, ...Object.fromEntries(arrays) };
}

/** A function that returns the recorded alternatives to a sampled token, the likeliest first; null without any. */
function alternativesOf({ ids, alternative_ids: others, alternative_logp: logp, named, named_ends: ends, named_text }) {
  if (!others) return null;
  const width = others.length / ids.length;
  const decoder = new TextDecoder();
  const textOf = (id) => {
    const place = named.indexOf(id);
    return visible(decoder.decode(named_text.subarray(place ? ends[place - 1] : 0, ends[place])));
  };
  return (at) =>
    Array.from({ length: width }, (_, k) => at * width + k)
      .filter((place) => Number.isFinite(logp[place]))
      .map((place) => ({ id: others[place], text: ends ? textOf(others[place]) : "", logp: logp[place] }))
      .sort((left, right) => right.logp - left.logp);
}

/** The tokens of a turn with text, log-prob, version and what a replay adds; a token of the prompt has no log-prob. */
async function readTurn(reply) {
  const columns = unpack(await reply.arrayBuffer());
  const { ends, text, prompt, ids, logp, raw_logp: raw, version, set_size: size } = columns;
  const known = REPLAYED.filter((name) => columns[name]);
  const decoder = new TextDecoder();
  const first = prompt.length;
  const tokens = Array.from({ length: first + ids.length }, (_, place) => {
    const at = place - first;
    const id = at < 0 ? prompt[place] : ids[at];
    const shown = ends ? visible(decoder.decode(text.subarray(place ? ends[place - 1] : 0, ends[place]))) : `${id} `;
    const token = { place, id, text: shown };
    if (at < 0) return token;
    const replayed = known.map((name) => [name, columns[name][at]]);
    const sampled = { logp: logp[at], raw: raw?.[at], version: version[at], size: size?.[at] };
    return { ...token, ...sampled, ...Object.fromEntries(replayed) };
  });
  const versions = [...new Set(version)].sort((a, b) => a - b);
  return { tokens, first, versions, grammar: columns.head.grammar, alternatives: alternativesOf(columns) };
}

const sheet = new CSSStyleSheet();
const tints = new Set();
document.adoptedStyleSheets = [sheet];

/** The class of a colour behind text: this share of a colour of the style sheet. A class for all tokens of a colour is
 * several times as fast as a style for each of them. */
function tint(name, percent) {
  const mark = `${name}-${percent}`;
  const rule = `.${mark} { background: color-mix(in srgb, var(--${name}) ${percent}%, var(--page)) }`;
  if (!tints.has(mark)) sheet.insertRule(rule);
  tints.add(mark);
  return mark;
}

const heat = (value) => tint("heat", 10 * LEVELS.filter((bound) => value > bound).length);

/** A signal of a replay, coloured by its share of the largest one; null if no token has it. */
function replayedSignal(sampled, title, about, value) {
  const known = sampled.filter((token) => Number.isFinite(value(token)));
  if (!known.length) return null;
  const size = (token) => Math.abs(value(token));
  const largest = known.reduce((most, token) => Math.max(most, size(token)), 0);
  const shade = (token) => Math.round((MOST_TINT * size(token)) / (largest || 1));
  const mark = (token) =>
    Number.isFinite(value(token)) ? tint(value(token) < 0 ? "heat" : "series-1", shade(token)) : "none";
  const legend = [
    ...(known.some((token) => value(token) > 0) ? [[tint("series-1", MOST_TINT), number(largest)]] : []),
    ["none", "0"],
    ...(known.some((token) => value(token) < 0) ? [[tint("heat", MOST_TINT), number(-largest)]] : []),
  ];
  return { title, about, mark, legend, heading: "Top movers", value };
}

/** The signals that a replay adds. */
function replayedSignals(sampled) {
  const signal = (title, about, value) => replayedSignal(sampled, title, about, value);
  const signals = {
    advantage: signal("advantage", "advantage of each token", (token) => token.advantage),
    weight: signal(
      "contribution to the loss",
      "how hard the step pushes the log-prob of each token up, or down",
      (token) => token.weight,
    ),
    ratio: signal(
      "ratio",
      "log of the ratio that the loss compares, in the last update: of the policy to π_old or to the sampler",
      (token) => Math.log(token.ratio),
    ),
    entropy: signal("entropy", "entropy of the policy that the step began with", (token) => token.entropy),
    kl: signal("KL", "estimate of the KL to the reference at each token", (token) => token.kl),
    mismatch: signal(
      "log-prob of the trainer",
      "the trainer's log-prob minus the sampler's, at the weights that the step began with",
      (token) => token.start_logp - token.logp,
    ),
  };
  return Object.fromEntries(Object.entries(signals).filter(([, found]) => found));
}

/** The tokens whose value of a signal is largest, above a bound; none if the signal has no value. */
function standOut(turn, { value, above = 0 } = {}) {
  if (!turn || !value) return [];
  const size = (token) => Math.abs(value(token));
  const found = turn.tokens.slice(turn.first).filter((token) => size(token) > above);
  return found.sort((left, right) => size(right) - size(left)).slice(0, MOST_LISTED);
}

/** The signal of the sizes of sets: the fewer tokens could be drawn, the stronger. */
function setSignal(sampled) {
  const groupOf = ({ size }) => (size > 0 ? SIZES.findIndex(([bound]) => size <= bound) : SIZES.length);
  const marks = [...SIZES.keys()].map((place) => tint("series-1", MOST_TINT - 12 * place));
  const names = [...SIZES.map(([, text]) => text), "all, or all but some"];
  const counts = names.map((_, group) => sampled.filter((token) => groupOf(token) === group).length);
  const entries = names.map((text, group) => [marks[group] ?? "none", `${text}: ${number(counts[group])}`]);
  return {
    title: "set",
    about: "number of tokens that the sampler could draw in place of each one, itself included",
    mark: (token) => marks[groupOf(token)] ?? "none",
    legend: entries.filter((_, group) => counts[group]),
  };
}

/** The signals of a turn: title, colour of a token, legend, and where tokens stand out, their value and a heading. */
function signalsOf(turn) {
  const sampled = turn.tokens.slice(turn.first);
  const bounds = [0, ...LEVELS].map((bound, index) => [tint("heat", 10 * index), index ? `> ${bound}` : "less"]);
  const colour = (version) => tint(`series-${1 + (turn.versions.indexOf(version) % COLOURS)}`, 25);
  const stateOf = (token) => STATES[token.state ?? STATES.length - 1];
  const states = STATES.map((state) => [state, sampled.filter((token) => stateOf(token) === state).length]);
  const signals = {
    logp: {
      title: "log-prob",
      about: "−log-prob of each sampled token, under the policy that sampled it",
      mark: (token) => heat(-token.logp),
      legend: bounds,
      heading: "Least likely tokens",
      value: (token) => token.logp,
      above: LEVELS[0],
    },
    version: {
      title: "policy version",
      about: "policy version that sampled each token",
      mark: (token) => colour(token.version),
      legend: turn.versions.map((version) => [colour(version), `version ${version}`]),
    },
    mask: {
      title: "mask",
      about: "tokens that the policy sampled, on which the loss is computed; all others are context",
      mark: (token) => tint(stateOf(token)[1], 25),
      legend: [
        ...states.filter(([, count]) => count).map(([[text, name], count]) => [tint(name, 25), `${text}, ${count}`]),
        ["none", `context, ${number(turn.first)}`],
      ],
    },
    ...replayedSignals(sampled),
  };
  if (sampled.some((token) => token.size)) signals.set = setSignal(sampled);
  if (sampled.some((token) => token.raw !== undefined)) {
    const change = (token) => Math.abs(token.logp - token.raw);
    signals.sampling = {
      title: "change by sampling options",
      about: "difference between the log-prob under the sampling distribution and under the model's own",
      mark: (token) => heat(change(token)),
      legend: bounds,
      heading: "Tokens whose log-prob the sampling options change most",
      value: change,
      above: LEVELS[0],
    };
  }
  return signals;
}

/** Some tokens on lines of their own. They exist only while they are near the window. */
function Block({ tokens, mark, chosen }) {
  const [shown, setShown] = useState(false);
  const place = useRef(null);
  const height = useRef("");
  const wanted = useRef(false);
  useEffect(() => {
    const check = (entries) => {
      const near = entries.at(-1).isIntersecting;
      if (!near) height.current = `${place.current.offsetHeight}px`;
      setShown(near);
    };
    const seen = new IntersectionObserver(check, { root: place.current.closest(".tokens"), rootMargin: "400px 0px" });
    seen.observe(place.current);
    return () => seen.disconnect();
  }, []);
  const mine = chosen != null && tokens[0].place <= chosen && chosen <= tokens.at(-1).place ? chosen : null;
  useEffect(() => {
    wanted.current = mine != null;
    if (wanted.current) setShown(true);
  }, [mine]);
  useEffect(() => {
    if (!shown || !wanted.current) return;
    wanted.current = false;
    place.current.querySelector(".chosen").scrollIntoView({ block: "nearest" });
  }, [mine, shown]);
  return useMemo(() => {
    if (!shown) return html`<div class="block" ref=${place} style=${{ height: height.current || "9rem" }}></div>`;
    return html`<div class="block" ref=${place} style=${{ height: "" }}>
      ${tokens.map((token) => {
        const isSampled = token.logp !== undefined;
        const name = `${isSampled ? mark(token) : "context"} ${token.place === mine ? "chosen" : ""}`;
        return html`<span data-place=${token.place} class=${name}>${token.text}</span>`;
      })}
    </div>`;
  }, [shown, tokens, mark, mine]);
}

/** How many tokens could be drawn. */
function setText(size) {
  if (size === 1) return "the only one that could be drawn";
  if (size > 0) return `drawn from a set of ${number(size)}`;
  return size ? `drawn from all but ${number(-size)}` : "drawn from the whole vocabulary";
}

/** The recorded alternatives to a token, with their probabilities. The list has its place before a token is chosen. */
function Alternatives({ token, turn }) {
  const isSampled = token?.logp !== undefined;
  const others = isSampled ? turn.alternatives(token.place - turn.first) : [];
  const item = ({ id, text, logp }) => html`<span class=${id === token.id ? "drawn" : ""} title=${`id ${id}`}>
    <code>${text ? JSON.stringify(text) : id}</code> ${number(Math.exp(logp))}
  </span>`;
  return html`<p class="alternatives" aria-label="alternatives" role="group" tabindex="0">
    <span class="muted">${isSampled ? "likeliest at this place:" : "alternatives of a sampled token"}</span>
    ${others.map(item)}
  </p>`;
}

function TokenFacts({ token, first }) {
  if (!token) return html`<p class="muted token-facts">Choose a token, or move with ← and →.</p>`;
  const sampled = token.logp !== undefined;
  const replayed = REPLAYED.filter((name) => name !== "state" && Number.isFinite(token[name]));
  const place = sampled ? `token ${token.place - first} of the answer` : `token ${token.place} of the prompt`;
  return html`<p class="token-facts" aria-live="polite">
    <span>${place}</span>
    <code>${JSON.stringify(token.text)}</code> <span>id ${token.id}</span>
    ${
      sampled &&
      html`<span>log-prob ${number(token.logp)}</span> <span>probability ${number(Math.exp(token.logp))}</span>
        ${token.raw !== undefined && html`<span>the model's own log-prob ${number(token.raw)}</span>`}
        ${token.size !== undefined && html`<span>${setText(token.size)}</span>`}
        <span>policy version ${token.version}</span>
        ${replayed.map((name) => html`<span>${FACTS[name] ?? name} ${number(token[name])}</span>`)}
        ${token.state !== undefined && html`<span>${STATES[token.state][0]}</span>`}`
    }
  </p>`;
}

/** Tokens in blocks, which end with a line of the text where one ends in time. */
function blocksOf(tokens) {
  const blocks = [];
  for (let begin = 0, end = 0; begin < tokens.length; begin = end) {
    end = Math.min(tokens.length, begin + BLOCK);
    const last = Math.min(tokens.length, begin + 2 * BLOCK);
    const line = tokens.slice(end - 1, last).findIndex((token) => token.text.endsWith("\n"));
    if (line >= 0) end += line;
    else if (last === tokens.length) end = last;
    blocks.push(tokens.slice(begin, end));
  }
  return blocks;
}

/** The tokens of one turn. rewards: texts of the rewards that were given at its last token. */
export function TokensView({ query, signal, onSignal, rewards }) {
  const { record: turn, error } = useQuery("tokens", query, false, readTurn);
  const [chosen, setChosen] = useState(null);
  const [open, setOpen] = useState(false);
  const signals = useMemo(() => (turn ? signalsOf(turn) : {}), [turn]);
  const parts = useMemo(
    () => (turn ? [turn.tokens.slice(0, turn.first), turn.tokens.slice(turn.first)].map(blocksOf) : []),
    [turn],
  );
  const name = signal in signals ? signal : "logp";
  const listed = useMemo(() => standOut(turn, signals[name]), [turn, name]);
  if (!turn) return html`<${Waiting} error=${error} />`;
  const { tokens, first, grammar } = turn;
  const { about, mark, legend, heading, value } = signals[name];
  const entries = legend.map(([mark, text]) => ["", text, mark]);
  const click = ({ target: { dataset } }) => dataset?.place !== undefined && setChosen(Number(dataset.place));
  const move = (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by) return;
    event.preventDefault();
    const least = open || first <= LONG_PROMPT ? 0 : first;
    setChosen(Math.max(least, Math.min(tokens.length - 1, chosen == null ? first : chosen + by)));
  };
  const block = (tokens) => html`<${Block} key=${tokens[0].place} tokens=${tokens} mark=${mark} chosen=${chosen} />`;
  const [prompt, answer] = parts.map((blocks) => blocks.map(block));
  const folded = html`<details open=${open} onToggle=${(event) => setOpen(event.target.open)}>
    <summary>prompt, ${number(first)} tokens</summary>
    ${open && prompt}
  </details>`;
  const option = ([value, { title }]) => html`<label>
    <input type="radio" name="signal" checked=${value === name} onChange=${() => onSignal(value)} /> ${title}
  </label>`;
  const mover = (token) => html`<button onClick=${() => setChosen(token.place)}>
    <code>${JSON.stringify(token.text)}</code> ${number(value(token))}
  </button>`;
  return html`<div class="signals tools" role="radiogroup" aria-label="signal">
      ${Object.entries(signals).map(option)}
    </div>
    <${Legend} mark="swatch" before=${html`<span class="muted">${about}:</span>`} entries=${entries} />
    ${grammar && html`<details><summary>its grammar</summary><pre class="said">${visible(grammar)}</pre></details>`}
    <${TokenFacts} token=${tokens[chosen]} first=${first} />
    ${turn.alternatives && html`<${Alternatives} token=${tokens[chosen]} turn=${turn} />`}
    <div class="tokens" tabindex="0" role="group" aria-label="tokens" onClick=${click} onKeyDown=${move}>
      ${first > LONG_PROMPT ? folded : prompt}${answer}
      ${rewards.map((text) => html`<span class="pill earned">${text}</span>`)}
    </div>
    ${listed.length > 0 && html`<h3>${heading}</h3><p class="movers">${listed.map(mover)}</p>`}`;
}
