// The page of the rollout queue of a run or of a separate store: open rollouts, runners, attempts.

import { Downloads, Facts, ForPrograms, groupLink, rolloutLink, rowsOf, Section } from "./base.js";
import { SortedTable, useParameters, useQuery, Waiting, Words } from "./base.js";
import { ago, duration, moment, number, visible } from "./text.js";
import { html } from "./vendor/preact-htm.js";

const time = (name) => (row) => html`<span title=${moment(row[name])}>${ago(row[name])}</span>`;
const seconds = (name) => (row) => duration(row[name]);
const words = (name) => (row) => html`<${Words} text=${visible(row[name])} />`;

export function StorePage() {
  const [{ run = "" }] = useParameters();
  const { record: page, error } = useQuery("store", { run }, true);
  if (!page) return html`<main><${Waiting} error=${error} /></main>`;
  const rollout = { name: "rollout", cell: (row) => rolloutLink(run, row.rollout) };
  const runner = { name: "runner", cell: (row) => visible(row.runner) || "the run itself" };
  const numeric = (name) => ({ name, numeric: true });
  const tables = {
    queue: ["Open rollouts", [{ name: "use" }, ...["queued", "preparing", "running"].map(numeric)]],
    runners: [
      "Runners",
      [
        runner,
        { ...numeric("running"), heading: "attempts under way" },
        numeric("succeeded"),
        { name: "others", heading: "ended otherwise" },
        { name: "mean_s", heading: "mean duration", cell: seconds("mean_s") },
        { name: "last_at", heading: "last claim or end", cell: time("last_at") },
      ],
    ],
    attempts: [
      "Attempts under way",
      [
        rollout,
        { name: "task", cell: (row) => groupLink(run, row.task) },
        { name: "use" },
        numeric("attempt"),
        runner,
        { name: "status" },
        numeric("turns"),
        { name: "began", cell: time("began") },
        { name: "timeout_s", heading: "limit", cell: seconds("timeout_s") },
      ],
    ],
    failures: [
      "Attempts that ended without success",
      [
        { name: "ended", cell: time("ended") },
        rollout,
        numeric("attempt"),
        runner,
        { name: "outcome" },
        { name: "retry", heading: "repeated", cell: (row) => (row.retry ? "✓" : "") },
        { name: "seconds", heading: "took", cell: seconds("seconds") },
        { name: "error", cell: words("error") },
      ],
    ],
  };
  const section = ([name, [title, columns]]) => {
    const rows = rowsOf(page[name]);
    const beside = html`<${Downloads} path="store" parameters=${{ run, table: name }} csv />`;
    const keys = name === "failures" ? ["rollout", "attempt"] : undefined;
    const table = html`<${SortedTable} caption=${title} columns=${columns} rows=${rows} keys=${keys} />`;
    return html`<${Section} title=${title} beside=${beside}>
      ${rows.length ? table : html`<p class="muted">None.</p>`}
    <//>`;
  };
  const facts = [
    ["run that owns it", visible(page.owner)],
    ["epoch", page.epoch || ""],
    ["model", visible(page.model)],
    ["events", number(page.events)],
    ["last write", ago(page.written_at)],
  ];
  return html`<main>
    <h1>Rollout queue</h1>
    ${error && html`<${Waiting} error=${error} />`}
    ${page.warnings.map((text) => html`<p class="problem" role="alert">${visible(text)}</p>`)}
    <${Facts} facts=${facts} />
    <p class="muted">Runners, ends and times are those of the newest ${number(page.recent)} events.</p>
    ${Object.entries(tables).map(section)}
    <${ForPrograms} path="store" parameters=${{ run }} />
  </main>`;
}
