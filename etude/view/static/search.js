// The page of a search over the rollouts of a run.

import { ask, Downloads, groupLink, rolloutLink, rowsOf, Search, searchLink, SortedTable } from "./base.js";
import { stepLink, useParameters, Words } from "./base.js";
import { number, visible } from "./text.js";
import { html, useEffect, useState } from "./vendor/preact-htm.js";

const MOST = 100;
const TYPING_MS = 400;
const SECONDS = 0.15;
const EXAMPLES = [
  ['"some text"', "in the prompt or an answer"],
  ["reward<0.2", "also tokens, turns, attempts, step, task, row, and reward/PART"],
  ["error:timeout", "also prompt, answer, observation, tool, tag, source"],
  ["outcome:failed", "also batch:no, truncated:yes, use:evaluation"],
  ["-tool:search", "without this"],
];

/** Search from a place back, until enough rollouts are found or all were looked at. */
function useSearch(run, q, from) {
  const [state, setState] = useState({ rows: [], looked: 0, busy: true });
  useEffect(() => {
    const control = new AbortController();
    const search = async () => {
      let found = { rows: [], looked: 0, damaged: 0, next: from, busy: true };
      try {
        while (found.busy) {
          setState(found);
          const bounds = { seconds: SECONDS, most: MOST - found.rows.length };
          const page = await ask("search", { run, q, from: found.next, ...bounds }, control.signal);
          const rows = [...found.rows, ...rowsOf(page.rollouts)];
          const [looked, damaged] = [found.looked + page.looked, found.damaged + page.damaged];
          found = { ...page, rows, looked, damaged, busy: page.next !== "" && rows.length < MOST };
        }
        setState(found);
      } catch (error) {
        if (error.name !== "AbortError") setState({ ...found, busy: false, error: error.message });
      }
    };
    const timer = setTimeout(search, state.looked ? TYPING_MS : 0);
    return () => {
      clearTimeout(timer);
      control.abort();
    };
  }, [run, q, from]);
  return state;
}

export function SearchPage() {
  const [{ run = "", q = "", from = "" }, change] = useParameters();
  const { rows, looked, damaged, reached, newest, next, busy, error } = useSearch(run, q, from);
  const columns = [
    { name: "rollout", cell: (row) => rolloutLink(run, row.rollout) },
    { name: "task", cell: (row) => groupLink(run, row.task) },
    { name: "step", numeric: true, cell: (row) => stepLink(run, row.step) },
    { name: "status" },
    ...["reward", "turns", "tokens", "attempts"].map((name) => ({ name, numeric: true })),
    { name: "text", cell: (row) => html`<${Words} text=${visible(row.text)} />` },
    { name: "why", heading: "why not in the batch", cell: (row) => html`<${Words} text=${visible(row.why)} />` },
  ];
  const back = reached == null || !next ? "" : `, back to rollout ${number(reached)} of ${number(newest)}`;
  const broken = damaged ? ` ${number(damaged)} of them are damaged.` : "";
  const example = ([word, about]) => html`<dt><code>${word}</code></dt><dd class="muted">${about}</dd>`;
  return html`<main>
    <h1>Search</h1>
    <p class="tools">
      <${Search} hasKey label="search the rollouts" value=${q} onChange=${(q) => change({ q, from: "" })} />
      <${Downloads} path="search" parameters=${{ run, q, from }} csv />
    </p>
    <details><summary>words of a search</summary><dl>${EXAMPLES.map(example)}</dl></details>
    ${error && html`<p class="problem" role="alert">${error}</p>`}
    <p class="muted looked" role=${busy ? "status" : null}>
      ${number(rows.length)} found. ${number(looked)} rollouts were looked at${back}.${broken} ${busy && "Searching …"}
    </p>
    ${rows.length > 0 && html`<${SortedTable} caption="rollouts" columns=${columns} rows=${rows} />`}
    <p class="tools">
      ${from && searchLink(run, q, "from the newest")}
      ${!busy && next && searchLink(run, q, "search further back", { from: next })}
    </p>
  </main>`;
}
