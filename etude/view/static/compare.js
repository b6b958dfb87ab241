// The page of two rollouts of a run: their numbers, and their messages side by side with what differs.

import { ForPrograms, groupLink, rolloutLink, Section, SortedTable, stepLink, useParameters } from "./base.js";
import { useQuery, Waiting } from "./base.js";
import { differences, number, sum, visible } from "./text.js";
import { html } from "./vendor/preact-htm.js";

function numbersOf({ status, reward, advantage, attempts, why }) {
  const attempt = attempts.at(-1) ?? { parts: {}, turns: [] };
  const parts = Object.entries(attempt.parts).map(([name, value]) => [`reward: ${name}`, value]);
  return Object.fromEntries([
    ["status", status],
    ["reward", reward],
    ...parts,
    ["advantage", advantage],
    ["turns", attempt.turns.length],
    ["sampled tokens", sum(attempt.turns.map(({ tokens }) => tokens))],
    ["ended by", attempt.turns.at(-1)?.finish],
    ["why not in the batch", visible(why)],
  ]);
}

/** Two messages at the same place of the conversations. */
function Pair({ messages: [one, other] }) {
  const parts =
    one && other ? differences(one.text, other.text) : [one, other].map((found) => [[found?.text ?? "", true]]);
  const shown = ([text, differs]) => (differs ? html`<mark>${visible(text)}</mark>` : visible(text));
  const side = (message, place) => html`<article class=${message?.by === "model" ? "message by-model" : "message"}>
    <h3>${visible(message?.by ?? "no message")}</h3>
    <pre class="said">${parts[place].map(shown)}</pre>
  </article>`;
  return html`<div class="pair">${[one, other].map(side)}</div>`;
}

export function ComparePage() {
  const [{ run = "", a = "", b = "" }] = useParameters();
  const found = [a, b].map((rollout) => useQuery("rollout", { run, rollout }));
  const pages = found.map(({ record }) => record);
  const error = found.map(({ error }) => error).find(Boolean);
  if (error || !pages[0] || !pages[1]) return html`<main><${Waiting} error=${error} /></main>`;
  const numbers = pages.map(numbersOf);
  const names = [...new Set(numbers.flatMap(Object.keys))];
  const rows = names.map((name) => ({ name, a: number(numbers[0][name]), b: number(numbers[1][name]) }));
  const shown = rows.filter((row) => row.a || row.b);
  const column = (name, place) => ({
    name,
    heading: `rollout ${pages[place].rollout}`,
    sortable: false,
    cell: (row) => (row.a === row.b ? row[name] : html`<mark>${row[name]}</mark>`),
  });
  const columns = [{ name: "name", heading: "", sortable: false }, ...["a", "b"].map(column)];
  const link = ({ rollout, task, step }) => html`<li>
    ${rolloutLink(run, rollout, `rollout ${rollout}`)} of task ${groupLink(run, task)}, step ${stepLink(run, step)}
  </li>`;
  const length = Math.max(...pages.map(({ conversation }) => conversation.length));
  const pair = (_, at) => html`<${Pair} messages=${pages.map(({ conversation }) => conversation[at])} />`;
  return html`<main>
    <h1>Rollouts ${a} and ${b}</h1>
    <ul>${pages.map(link)}</ul>
    <${SortedTable} caption="numbers" columns=${columns} rows=${shown} />
    <${Section} title="Messages">${Array.from({ length }, pair)}<//>
    <${ForPrograms} path="rollout" parameters=${{ run, rollout: a }} />
  </main>`;
}
