// The page of one rollout: its fate, its attempts, its conversation, and its exact tokens.

import {
  Downloads,
  Status,
  Waiting,
  address,
  duration,
  html,
  moment,
  number,
  optionText,
  useMemo,
  useParameters,
  useQuery,
} from "./base.js";
import { TokensView, visible } from "./tokens.js";

const LONG_TEXT = 600;
const CALL = /(<tool_call>[\s\S]*?(?:<\/tool_call>|$))/;

/** The reason for which a rollout is, or is not, in the batch of a step. */
export function Fate({ page }) {
  return page.why
    ? html`<section aria-label="batch">
        <h2>Why is this rollout not in the batch?</h2>
        <p class="fate">${visible(page.why)}</p>
        ${page.cause && !page.why.includes(page.cause) && html`<pre class="problem">${visible(page.cause)}</pre>`}
      </section>`
    : html`<section aria-label="batch">
        <p class="fate">Step ${page.step} trained on this rollout.</p>
      </section>`;
}

/** A link to the page of a step; null without a step. */
export const stepLink = (run, step) =>
  step == null ? null : html`<a href=${address("step", { run, step })}>${number(step)}</a>`;

/** Facts as a list of names and values; those without a value are left out. */
export function Facts({ facts }) {
  return html`<dl class="facts">
    ${facts
      .filter(([, value]) => value != null && value !== "")
      .map(
        ([name, value]) =>
          html`<div>
            <dt>${name}</dt>
            <dd>${value}</dd>
          </div>`,
      )}
  </dl>`;
}

/** The reward of an attempt in parts. */
export const rewardFacts = (attempt) => [
  ["reward", number(attempt?.reward)],
  ...Object.entries(attempt?.parts ?? {}).map(([name, value]) => [`reward: ${name}`, number(value)]),
];

/** A text of a rollout. Long ones are folded. */
export function LongText({ text, title }) {
  const shown = visible(text);
  return text.length > LONG_TEXT
    ? html`<details>
        <summary>${title}, ${number(text.length)} characters: ${shown.slice(0, 80)}…</summary>
        <pre class="said">${shown}</pre>
      </details>`
    : html`<pre class="said">${shown}</pre>`;
}

/** The words of the model; its tool calls are folded. */
function ModelText({ text }) {
  return text.split(CALL).map((part) => {
    if (!part.startsWith("<tool_call>")) return part && html`<pre class="said">${visible(part)}</pre>`;
    const name = /"name"\s*:\s*"([^"]*)"/.exec(part)?.[1] ?? /<function=([^>]*)>/.exec(part)?.[1] ?? "";
    return html`<details>
      <summary>tool call ${visible(name)}</summary>
      <pre class="said">${visible(part)}</pre>
    </details>`;
  });
}

function Conversation({ prompt, messages }) {
  return html`<div class="conversation">
    <article class="message">
      <h3>prompt</h3>
      <${LongText} text=${prompt} title="prompt" />
    </article>
    ${messages.map(
      ({ by, text }) =>
        html`<article class=${`message ${by === "model" ? "by-model" : ""}`}>
          <h3>${visible(by)}</h3>
          ${by === "model" ? html`<${ModelText} text=${text} />` : html`<${LongText} text=${text} title="answer" />`}
        </article>`,
    )}
  </div>`;
}

function AttemptFacts({ attempt }) {
  const took = attempt.ended && attempt.began ? duration(attempt.ended - attempt.began) : "";
  const facts = [
    ...rewardFacts(attempt),
    ["began", moment(attempt.began)],
    ["took", took],
    ["turns", number(attempt.turns.length)],
    ["sampled tokens", number(attempt.turns.reduce((sum, turn) => sum + turn.tokens, 0))],
    ["truncated", attempt.truncated ? "yes" : ""],
    ["runner", visible(attempt.runner)],
  ];
  return html`<${Facts} facts=${facts} />
    ${attempt.error && html`<pre class="problem">${visible(attempt.error)}</pre>`}
    ${
      attempt.notes.length > 0 &&
      html`<details>
        <summary>${attempt.notes.length} notes</summary>
        ${attempt.notes.map(
          ({ name, data }) => html`<pre class="said">${visible(`${name} ${optionText(data)}`)}</pre>`,
        )}
      </details>`
    }`;
}

/** The rewards that were given at the last token of a turn. */
function rewardsAt(attempt, index) {
  const own = attempt.turns[index].reward;
  const total = index === attempt.turns.length - 1 ? attempt.reward : null;
  return [
    ...(own == null ? [] : [`reward of this turn ${number(own)}`]),
    ...(total == null ? [] : [`reward ${number(total)}`]),
  ];
}

function Tokens({ page, run, attempt, index, parameters, change }) {
  const { turns } = attempt;
  if (!turns.length) return html`<p class="muted">This attempt has no recorded turn, so it has no tokens.</p>`;
  const turn = Math.min(turns.length - 1, Number(parameters.turn ?? turns.length - 1) || 0);
  const go = (to) => change({ turn: String(to) });
  const shown = turns[turn];
  const sampled = `${number(shown.tokens)} sampled, ended by ${shown.finish}`;
  const counts = `${number(shown.prompt_tokens)} tokens of prompt, ${sampled}`;
  return html`<p class="tools">
      ${
        turns.length > 1 &&
        html`<button onClick=${() => go(turn - 1)} disabled=${turn === 0}>previous turn</button>
          <button onClick=${() => go(turn + 1)} disabled=${turn === turns.length - 1}>next turn</button>`
      }
      <span class="muted">
        ${[`turn ${turn + 1} of ${turns.length}: ${counts}`, ...shown.tags.map(visible)].join(", ")}
      </span>
    </p>
    <${TokensView}
      run=${run}
      rollout=${page.rollout}
      attempt=${index}
      turn=${turn}
      signal=${parameters.signal ?? "logp"}
      onSignal=${(signal) => change({ signal })}
      rewards=${rewardsAt(attempt, turn)}
    />`;
}

function AttemptsSection({ page, run, parameters, change }) {
  const last = page.attempts.length - 1;
  if (last < 0) return html`<${Conversation} prompt=${page.prompt} messages=${[]} />`;
  const index = Math.max(0, Math.min(last, Number(parameters.attempt ?? last) || 0));
  const attempt = page.attempts[index];
  const messages = index === last ? page.conversation : attempt.turns.map(({ text }) => ({ by: "model", text }));
  const tokens = parameters.view === "tokens";
  return html`<section aria-label="attempts">
    ${
      last > 0 &&
      html`<h2>Attempts</h2>
        <p class="tools">
          ${page.attempts.map(
            (other, number) =>
              html`<button
                aria-pressed=${number === index ? "true" : "false"}
                onClick=${() => change({ attempt: number === last ? "" : String(number), turn: "" })}
              >
                ${number + 1}: ${other.status}
              </button>`,
          )}
        </p>`
    }
    <${AttemptFacts} attempt=${attempt} />
    <p class="tools views">
      <button aria-pressed=${tokens ? "false" : "true"} onClick=${() => change({ view: "" })}>Conversation</button>
      <button aria-pressed=${tokens ? "true" : "false"} onClick=${() => change({ view: "tokens" })}>Tokens</button>
    </p>
    ${
      tokens
        ? html`<${Tokens}
            page=${page}
            run=${run}
            attempt=${attempt}
            index=${index}
            parameters=${parameters}
            change=${change}
          />`
        : html`<${Conversation} prompt=${page.prompt} messages=${messages} />`
    }
  </section>`;
}

export function RolloutPage() {
  const [parameters, change] = useParameters();
  const { run = "", rollout = "" } = parameters;
  const { record: page, error } = useQuery("rollout", { run, rollout });
  const fields = useMemo(() => Object.entries(page?.fields ?? {}).filter(([name]) => name !== "prompt"), [page]);
  if (!page) return html`<main><${Waiting} error=${error} /></main>`;
  return html`<main>
    <header>
      <h1>Rollout ${page.rollout} <${Status} status=${page.status} /></h1>
      <${Facts}
        facts=${[
          ["task", html`<a href=${address("group", { run, task: page.task })}>${page.task}</a>`],
          ["sample", page.sample],
          ["step", stepLink(run, page.step)],
          ["reward", number(page.reward)],
          ["used for", page.use === "val" ? "evaluation" : "training"],
        ]}
      />
    </header>
    <${Fate} page=${page} />
    ${
      fields.length > 0 &&
      html`<details>
        <summary>fields of the task</summary>
        <dl class="facts">
          ${fields.map(
            ([name, value]) =>
              html`<div>
                <dt>${visible(name)}</dt>
                <dd>${visible(optionText(value))}</dd>
              </div>`,
          )}
        </dl>
      </details>`
    }
    <${AttemptsSection} page=${page} run=${run} parameters=${parameters} change=${change} />
    <p class="tools muted">
      <span>for programs: this page</span> <${Downloads} path="rollout" parameters=${{ run, rollout }} />
    </p>
  </main>`;
}
