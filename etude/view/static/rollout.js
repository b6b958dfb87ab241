// The page of one rollout: its fate, its attempts, its conversation, and its exact tokens.

import { address, Choice, evaluationLink, Facts, ForPrograms, groupLink, isSaved, Neighbours } from "./base.js";
import { replayLink, rowsOf, Section, Select, SortedTable, Status, stepLink } from "./base.js";
import { useParameters, useQuery, Waiting, Words } from "./base.js";
import { Replays } from "./replay.js";
import { duration, moment, number, optionText, sum, visible } from "./text.js";
import { TokensView } from "./tokens.js";
import { html, useEffect } from "./vendor/preact-htm.js";

const LONG_TEXT = 600;
const CALL = /(<tool_call>[\s\S]*?(?:<\/tool_call>|$))/;

/** True until a step has trained on the rollouts of a page, or dropped them. */
export const isOpen = ({ step }) => step == null;

const Said = ({ text }) => html`<pre class="said">${visible(text)}</pre>`;

/** A field for the number of a rollout to compare this one with. */
function CompareWith({ run, rollout }) {
  const open = (event) => {
    event.preventDefault();
    location.assign(address("compare", { run, a: rollout, b: event.target.elements.other.value }));
  };
  return html`<form onSubmit=${open}>
    <label>compare with rollout <input name="other" inputmode="numeric" pattern="\\d+" size="6" required /></label>
  </form>`;
}

/** The reason for which a rollout is, or is not, in the batch of a step. */
function Fate({ page: { why, cause, step, use } }) {
  if (!why) return html`<p class="fate">Step ${step} trained on this rollout.</p>`;
  const reason = html`<p class="fate">${visible(why)}</p>
    ${cause && !why.includes(cause) && html`<pre class="problem">${visible(cause)}</pre>`}`;
  if (use === "val") return reason;
  return html`<${Section} title="Why is this rollout not in the batch?" label="batch">${reason}<//>`;
}

/** The step of rollouts. An evaluation scores the policy after its step. */
export const stepFact = (run, step, use) =>
  use === "val" ? ["scored after step", evaluationLink(run, step)] : ["step", stepLink(run, step)];

/** The reward of an attempt in parts. */
export const rewardFacts = (attempt) => [
  ["reward", number(attempt?.reward)],
  ...Object.entries(attempt?.parts ?? {}).map(([name, value]) => [`reward: ${name}`, number(value)]),
];

/** The answer that a task expects, where its data have one. */
export const expectedFact = ({ answer, ground_truth = answer }) => {
  const text = ground_truth == null ? "" : visible(optionText(ground_truth));
  return ["expected answer", text && html`<${Words} text=${text} />`];
};

/** A text of a rollout. Long ones are folded. */
function LongText({ text, title }) {
  if (text.length <= LONG_TEXT) return html`<${Said} text=${text} />`;
  return html`<details>
    <summary>${title}, ${number(text.length)} characters: ${visible(text.slice(0, 80))}…</summary>
    <${Said} text=${text} />
  </details>`;
}

/** The words of the model; its tool calls are folded. */
function ModelText({ text }) {
  return text.split(CALL).map((part) => {
    if (!part.startsWith("<tool_call>")) return part && html`<${Said} text=${part} />`;
    const name = /"name"\s*:\s*"([^"]*)"/.exec(part)?.[1] ?? /<function=([^<>\n]{1,200})>/.exec(part)?.[1] ?? "";
    return html`<details><summary>tool call ${visible(name)}</summary><${Said} text=${part} /></details>`;
  });
}

/** A text with the pictures that it names at their places. sources: of the pictures, by their names. */
function Illustrated({ text, title, sources }) {
  if (!sources.size) return html`<${LongText} text=${text} title=${title} />`;
  const part = (part) =>
    sources.has(part)
      ? html`<img src=${sources.get(part)} alt=${part} loading="lazy" />`
      : part.trim() && html`<${LongText} text=${part.trim()} title=${title} />`;
  return text.split(/(\[image [0-9a-f]{8}\])/).map(part);
}

/** A message of a conversation. named: the hashes of its pictures. below: the sources of pictures below it. pictures:
 * addresses by hash. */
function Message({ by, text, images: named = "", below, pictures }) {
  const isModel = by === "model";
  const image = (source, place) => html`<img src=${source} alt=${`image ${place + 1}`} loading="lazy" />`;
  const shown = named.split(" ").filter((digest) => pictures[digest]);
  const sources = new Map(shown.map((digest) => [`[image ${digest.slice(0, 8)}]`, pictures[digest]]));
  return html`<article class=${isModel ? "message by-model" : "message"}>
    <h3>${visible(by)}</h3>
    ${isModel ? html`<${ModelText} text=${text} />` : html`<${Illustrated} ...${{ text, title: by, sources }} />`}
    ${below.map(image)}
  </article>`;
}

/** Messages by role. images: those of the task, which stand below the first message that is not the system's, unless
 * messages name their pictures. pictures: the addresses of these, by hash. */
export function Conversation({ messages, images, pictures = {} }) {
  const first = messages.findIndex(({ by }) => by !== "system" && by !== "tools");
  const areNamed = messages.some((message) => message.images);
  const below = (place) => (place === first && !areNamed ? images : []);
  const message = (message, place) => html`<${Message} ...${message} below=${below(place)} pictures=${pictures} />`;
  const none = html`<p class="muted">The model was not called, so there is no message.</p>`;
  return html`<div class="conversation">${messages.length ? messages.map(message) : none}</div>`;
}

/** The spans that the agent sent, each with a bar at its place in the attempt. */
function Spans({ spans, count }) {
  const rows = rowsOf(spans);
  const first = Math.min(0, ...spans.start);
  const length = Math.max(...rows.map(({ start, seconds }) => start + seconds)) - first || 1;
  const share = (seconds) => `${(100 * seconds) / length}%`;
  const bar = ({ start, seconds, status }) => {
    const style = { marginLeft: share(start - first), width: share(seconds) };
    return html`<i class=${status.startsWith("error") ? "bar failed" : "bar"} style=${style}></i>`;
  };
  const details = (row) => html`<details>
    <summary>${Object.keys(row.details.attributes).length} attributes</summary>
    <${Said} text=${JSON.stringify(row.details, null, 2)} />
  </details>`;
  const columns = [
    { name: "name", cell: (row) => html`<${Words} text=${"\u2003".repeat(row.depth) + visible(row.name)} />` },
    { name: "time", sortable: false, cell: bar },
    { name: "start", heading: "start, s", numeric: true },
    { name: "seconds", heading: "duration, s", numeric: true },
    { name: "status", cell: (row) => html`<${Words} text=${visible(row.status)} />` },
    { name: "attributes", sortable: false, cell: details },
  ];
  return html`<details>
    <summary>${rows.length < count && `${number(rows.length)} of `}${number(count)} spans</summary>
    <${SortedTable} caption="spans" columns=${columns} rows=${rows} keys=${["span"]} />
  </details>`;
}

function AttemptFacts({ attempt: { began, ended, turns, truncated, runner, error, notes, spans, ...rest } }) {
  const facts = [
    ...rewardFacts(rest),
    ["began", moment(began)],
    ["took", ended && began ? duration(ended - began) : ""],
    ["turns", number(turns.length)],
    ["sampled tokens", number(sum(turns.map((turn) => turn.tokens)))],
    ["truncated", truncated ? "yes" : ""],
    ["runner", visible(runner)],
  ];
  const lines = notes.map(({ name, data }) => html`<${Said} text=${`${name} ${optionText(data)}`} />`);
  return html`<${Facts} facts=${facts} />
    ${error && html`<pre class="problem">${visible(error)}</pre>`}
    ${notes.length > 0 && html`<details><summary>${notes.length} notes</summary>${lines}</details>`}
    ${spans.name.length > 0 && html`<${Spans} spans=${spans} count=${rest.span_count} />`}`;
}

/** The rewards that were given at the last token of a turn. */
function rewardsAt({ turns, reward }, index) {
  const own = turns[index].reward;
  const total = index === turns.length - 1 ? reward : null;
  const texts = [
    own == null ? "" : `reward of this turn ${number(own)}`,
    total == null ? "" : `reward ${number(total)}`,
  ];
  return texts.filter(Boolean);
}

function Tokens({ page, run, attempt, index, parameters, change }) {
  const { turns } = attempt;
  if (!turns.length) return html`<p class="muted">This attempt has no recorded turn, so it has no tokens.</p>`;
  const last = turns.length - 1;
  const turn = Math.min(last, Number(parameters.turn ?? last) || 0);
  const go = (by, disabled, text) =>
    html`<button onClick=${() => change({ turn: String(turn + by) })} disabled=${disabled}>${text}</button>`;
  const { tokens, prompt_tokens, finish, tags } = turns[turn];
  const counts = `${number(prompt_tokens)} tokens of prompt, ${number(tokens)} sampled, ended by ${finish}`;
  const { names = [], options = [] } = (index === page.attempts.length - 1 && page.replays) || {};
  const sides = names.flatMap((name, place) => [
    [`${name} recorded`, `${name}: the run's options`],
    ...(options[place] ? [[`${name} changed`, `${name}: ${options[place]}`]] : []),
  ]);
  const { replay = names[0], side = "recorded" } = parameters;
  const choose = (value) => change({ replay: value.split(" ")[0], side: value.split(" ")[1] });
  const replays = html`<p class="tools">
    <${Select} label="signals of the replay" value=${`${replay} ${side}`} options=${sides} onChange=${choose} />
    ${replayLink(run, replay, "the replay")}
  </p>`;
  return html`<p class="tools">
      ${last > 0 && [go(-1, turn === 0, "previous turn"), go(1, turn === last, "next turn")]}
      <span class="muted">${[`turn ${turn + 1} of ${turns.length}: ${counts}`, ...tags.map(visible)].join(", ")}</span>
    </p>
    ${names.length > 0 && replays}
    <${TokensView} key=${`${index} ${turn} ${replay} ${side}`}
      query=${{ run, rollout: page.rollout, attempt: index, turn, ...(names.length ? { replay, side } : {}) }}
      signal=${parameters.signal ?? "logp"} onSignal=${(signal) => change({ signal })}
      rewards=${rewardsAt(attempt, turn)} />
    ${!names.length && html`<${Replays} run=${run} replays=${page.replays} />`}`;
}

/** The turns of an attempt where its conversation branches: turns that continue each other stand in one line. */
function Branches({ turns, choose }) {
  const after = (parent) => turns.filter((turn) => (turn.parent ?? -1) === parent);
  const line = (first) => {
    const chain = [first];
    let next = after(first.index);
    for (; next.length === 1; next = after(next[0].index)) chain.push(next[0]);
    const link = ({ index }) => html`<button onClick=${() => choose(index)}>turn ${index + 1}</button> `;
    return html`<li>${chain.map(link)}${next.length > 0 && html`<ul>${next.map(line)}</ul>`}</li>`;
  };
  if (turns.every(({ parent }, place) => place === 0 || parent === place - 1)) return "";
  return html`<${Section} title="Branches of the conversation" label="branches"><ul>${after(-1).map(line)}</ul><//>`;
}

function AttemptsSection({ page, run, parameters, change }) {
  const last = page.attempts.length - 1;
  const { conversation, images, pictures } = page;
  if (last < 0) return html`<${Conversation} ...${{ messages: conversation, images, pictures }} />`;
  const index = Math.max(0, Math.min(last, Number(parameters.attempt ?? last) || 0));
  const attempt = page.attempts[index];
  const messages = index === last ? conversation : attempt.turns.map(({ text }) => ({ by: "model", text }));
  const isTokens = parameters.view === "tokens";
  const view = (text, view, chosen) => html`<${Choice} chosen=${chosen} onChoose=${() => change({ view })}>${text}<//>`;
  const choice = ({ status }, number) => {
    const choose = () => change({ attempt: number === last ? "" : String(number), turn: "" });
    return html`<${Choice} chosen=${number === index} onChoose=${choose}>${number + 1}: ${status}<//>`;
  };
  const shown = isTokens
    ? html`<${Tokens} ...${{ page, run, attempt, index, parameters, change }} />`
    : html`<${Conversation} ...${{ messages, images, pictures }} />`;
  return html`<section aria-label="attempts">
    ${last > 0 && html`<h2>Attempts</h2><p class="tools">${page.attempts.map(choice)}</p>`}
    <${AttemptFacts} attempt=${attempt} />
    <${Branches} turns=${attempt.turns} choose=${(turn) => change({ view: "tokens", turn: String(turn) })} />
    <p class="tools views">${view("Conversation", "", !isTokens)}${view("Tokens", "tokens", isTokens)}</p>
    ${shown}
  </section>`;
}

export function RolloutPage() {
  const [parameters, change] = useParameters();
  const { run = "", rollout = "", pick = "", step = "" } = parameters;
  const { record: page, error } = useQuery("rollout", rollout ? { run, rollout } : { run, pick, step }, isOpen);
  useEffect(() => {
    if (page && !rollout) change({ rollout: page.rollout, pick: "", step: "" });
  }, [page]);
  if (!page) return html`<main><${Waiting} error=${error} /></main>`;
  const fields = Object.entries(page.fields);
  const facts = [
    ["task", groupLink(run, page.task)],
    ["sample", page.sample],
    stepFact(run, page.step, page.use),
    ["reward", number(page.reward)],
    ["advantage", number(page.advantage)],
    expectedFact(page.fields),
    ["used for", page.use === "val" ? "evaluation" : "training"],
  ];
  const details = fields.map(([name, value]) => [visible(name), visible(optionText(value))]);
  return html`<main>
    <h1>Rollout ${page.rollout} <${Status} status=${page.status} /></h1>
    ${error && html`<${Waiting} error=${error} />`}
    <div class="tools">
      <${Neighbours} page="rollout" before=${page.before} after=${page.after} />
      ${!isSaved && html`<${CompareWith} run=${run} rollout=${page.rollout} />`}
    </div>
    <${Facts} facts=${facts} />
    <${Fate} page=${page} />
    ${fields.length > 0 && html`<details><summary>fields of the task</summary><${Facts} facts=${details} /></details>`}
    <${AttemptsSection} page=${page} run=${run} parameters=${parameters} change=${change} />
    <${ForPrograms} path="rollout" parameters=${{ run, rollout }} />
  </main>`;
}
