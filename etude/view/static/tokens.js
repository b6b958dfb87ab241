// The exact tokens of one turn, coloured by one signal.

import { address, html, number, useEffect, useMemo, useRef, useState } from "./base.js";

const BLOCK = 200;
const LONG_PROMPT = 600;
const LEVELS = [0.05, 0.3, 0.7, 1.4, 2.3, 4];
const COLOURS = 8;
const MOST_LISTED = 12;
const TYPES = { int32: Int32Array, float32: Float32Array, uint8: Uint8Array };

/** The columns of a reply: `head`, and an array by name. */
export function unpack(bytes) {
  const size = new DataView(bytes).getUint32(0, true);
  const { columns, ...head } = JSON.parse(new TextDecoder().decode(new Uint8Array(bytes, 4, size)));
  const arrays = Object.entries(columns).map(([name, column]) => [
    name,
    new TYPES[column.type](bytes, 4 + size + column.offset, column.count),
  ]);
  return { head, ...Object.fromEntries(arrays) };
}

/** A text with its control characters, and those that turn the direction of writing, as codes. */
export function visible(text) {
  // biome-ignore lint/suspicious/noControlCharactersInRegex: they are what is looked for
  return text.replace(/[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]/g, (found) => {
    const code = found.charCodeAt(0);
    return code < 256 ? `\\x${code.toString(16).padStart(2, "0")}` : `\\u${code.toString(16)}`;
  });
}

/** The columns of a turn, and its tokens with text, log-prob and version; a token of the prompt has no log-prob. */
function useTokens(parameters) {
  const [state, setState] = useState({});
  const name = JSON.stringify(parameters);
  useEffect(() => {
    const control = new AbortController();
    const load = async () => {
      try {
        const reply = await fetch(address("api/tokens", parameters), { signal: control.signal });
        if (!reply.ok) throw new Error((await reply.json()).error);
        setState({ name, turn: readTurn(unpack(await reply.arrayBuffer())) });
      } catch (error) {
        if (error.name !== "AbortError") setState({ name, error: error.message });
      }
    };
    load();
    return () => control.abort();
  }, [name]);
  return state.name === name ? state : {};
}

function readTurn(columns) {
  const decoder = new TextDecoder();
  const { ends, text, prompt, ids } = columns;
  const count = prompt.length + ids.length;
  const tokens = Array.from({ length: count }, (_, place) => {
    const sampled = place - prompt.length;
    const id = sampled < 0 ? prompt[place] : ids[sampled];
    const shown = ends ? visible(decoder.decode(text.subarray(place ? ends[place - 1] : 0, ends[place]))) : `${id} `;
    return sampled < 0
      ? { place, id, text: shown }
      : {
          place,
          id,
          text: shown,
          logp: columns.logp[sampled],
          raw: columns.raw_logp?.[sampled],
          version: columns.version[sampled],
        };
  });
  const first = count - ids.length;
  return { tokens, first, opened: columns.head.opened, versions: [...new Set(columns.version)].sort((a, b) => a - b) };
}

const level = (loss) => LEVELS.filter((bound) => loss > bound).length;

/** The signals of a turn: a heading, the class of a token, the legend, and where it helps the tokens that stand out. */
function signalsOf(turn) {
  const sampled = turn.tokens.slice(turn.first);
  const heat = (value) => `heat-${level(value)}`;
  const bounds = [0, ...LEVELS].map((bound, index) => [`heat-${index}`, index ? `> ${bound}` : "less"]);
  const colour = (version) => `version-${1 + (turn.versions.indexOf(version) % COLOURS)}`;
  const least = (value) => [...sampled].sort((left, right) => value(right) - value(left)).slice(0, MOST_LISTED);
  const signals = {
    logp: {
      title: "log-prob",
      about: "−log-prob of each sampled token, under the policy that sampled it",
      mark: (token) => heat(-token.logp),
      legend: bounds,
      listed: least((token) => -token.logp).filter((token) => token.logp < -LEVELS[0]),
      heading: "Least likely tokens",
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
      mark: () => "action",
      legend: [
        ["action", `sampled, ${number(sampled.length)}`],
        ["context", `context, ${number(turn.first)}`],
      ],
    },
  };
  if (sampled.some((token) => token.raw !== undefined)) {
    const change = (token) => Math.abs(token.logp - token.raw);
    signals.sampling = {
      title: "change by sampling options",
      about: "difference between the log-prob under the sampling distribution and under the model's own",
      mark: (token) => heat(change(token)),
      legend: bounds,
      listed: least(change).filter((token) => change(token) > LEVELS[0]),
      heading: "Tokens whose log-prob the sampling options change most",
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
        const marked = token.logp === undefined ? "context" : mark(token);
        const name = token.place === mine ? `${marked} chosen` : marked;
        return html`<span data-place=${token.place} class=${name}>${token.text}</span>`;
      })}
    </div>`;
  }, [shown, tokens, mark, mine]);
}

function TokenFacts({ token, first }) {
  if (!token) return html`<p class="muted token-facts">Choose a token, or move with ← and →.</p>`;
  const sampled = token.logp !== undefined;
  const place = sampled ? `token ${token.place - first} of the answer` : `token ${token.place} of the prompt`;
  return html`<p class="token-facts" aria-live="polite">
    <span>${place}</span>
    <code>${JSON.stringify(token.text)}</code> <span>id ${token.id}</span>
    ${
      sampled &&
      html`<span>log-prob ${number(token.logp)}</span> <span>probability ${number(Math.exp(token.logp))}</span>
        ${token.raw !== undefined && html`<span>the model's own log-prob ${number(token.raw)}</span>`}
        <span>policy version ${token.version}</span>`
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
export function TokensView({ run, rollout, attempt, turn: index, signal, onSignal, rewards }) {
  const { turn, error } = useTokens({ run, rollout, attempt, turn: index });
  const [chosen, setChosen] = useState(null);
  const [open, setOpen] = useState(false);
  const signals = useMemo(() => (turn ? signalsOf(turn) : null), [turn]);
  const parts = useMemo(
    () => (turn ? [blocksOf(turn.tokens.slice(0, turn.first)), blocksOf(turn.tokens.slice(turn.first))] : [[], []]),
    [turn],
  );
  useEffect(() => setChosen(null), [turn]);
  if (error) return html`<p class="problem" role="alert">${error}</p>`;
  if (!turn) return html`<p class="muted" role="status">Loading …</p>`;
  const name = signal in signals ? signal : "logp";
  const { about, mark, legend, listed = [], heading } = signals[name];
  const click = (event) => {
    const place = event.target.dataset?.place;
    if (place !== undefined) setChosen(Number(place));
  };
  const move = (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by) return;
    event.preventDefault();
    const least = open || turn.first <= LONG_PROMPT ? 0 : turn.first;
    setChosen(Math.max(least, Math.min(turn.tokens.length - 1, chosen == null ? turn.first : chosen + by)));
  };
  const draw = (blocks) =>
    blocks.map(
      (tokens) => html`<${Block} key=${tokens[0].place} tokens=${tokens} mark=${mark} chosen=${chosen} />`,
    );
  return html`<div class="signals tools" role="radiogroup" aria-label="signal">
      ${Object.entries(signals).map(
        ([value, { title }]) =>
          html`<label
            ><input type="radio" name="signal" checked=${value === name} onChange=${() => onSignal(value)} />
            ${title}</label
          >`,
      )}
    </div>
    <p class="legend">
      <span class="muted">${about}:</span>
      ${legend.map(([mark, text]) => html`<span><i class=${`swatch ${mark}`}></i>${text}</span>`)}
    </p>
    <${TokenFacts} token=${turn.tokens[chosen]} first=${turn.first} />
    <div class="tokens" tabindex="0" role="group" aria-label="tokens" onClick=${click} onKeyDown=${move}>
      ${
        turn.first > LONG_PROMPT
          ? html`<details open=${open} onToggle=${(event) => setOpen(event.target.open)}>
              <summary>prompt, ${number(turn.first)} tokens</summary>
              ${open && draw(parts[0])}
            </details>`
          : draw(parts[0])
      }
      ${draw(parts[1])}
      ${rewards.map((text) => html`<span class="earned">${text}</span>`)}
    </div>
    ${
      listed.length > 0 &&
      html`<h3>${heading}</h3>
        <p class="movers">
          ${listed.map(
            (token) =>
              html`<button onClick=${() => setChosen(token.place)}>
                <code>${JSON.stringify(token.text)}</code> ${number(token.logp)}
              </button>`,
          )}
        </p>`
    }`;
}
