// The page of all runs: a table, and the curves of those that are chosen.

import { address, ask, Downloads, Legend, rowsOf, Search, Section, SortedTable } from "./base.js";
import { Status, useParameters, useQuery, Waiting, Words } from "./base.js";
import { arrange, CurveControls, CurvePanel, seriesName, stepRange } from "./charts.js";
import { ago, matcher, moment, number, optionText } from "./text.js";
import { html, useEffect, useMemo, useState } from "./vendor/preact-htm.js";

const MOST_COMPARED = 8;
const background = (order) => `var(--${seriesName(order)})`;

function RunCell({ row: { run, recipe, step }, order, onChoose }) {
  const chosen = order >= 0;
  const page = recipe || step != null ? "run" : "store"; // a directory with a journal alone
  return html`<span class="run-name">
    <input type="checkbox" checked=${chosen} aria-label=${`compare ${run}`} onChange=${() => onChoose(run)} />
    ${chosen && html`<i class="dot" style=${{ background: background(order) }}></i>`}
    <a href=${address(page, { run })}>${run}</a>
  </span>`;
}

/** The curves of several runs in the same panels. */
function Comparison({ runs, parameters, change }) {
  const names = parameters.metrics ?? "";
  const [found, setFound] = useState({});
  const [error, setError] = useState(null);
  useEffect(() => {
    const control = new AbortController();
    Promise.all(runs.map((run) => ask("curves", { run, names }, control.signal)))
      .then((records) => {
        setFound(Object.fromEntries(runs.map((run, index) => [run, records[index]])));
        setError(null);
      })
      .catch((failure) => failure.name !== "AbortError" && setError(failure.message));
    return () => control.abort();
  }, [runs.join("\n"), names]);
  const known = runs.filter((run) => found[run]);
  const { view, curves } = arrange(
    known.map((run) => found[run]),
    parameters,
  );
  const metrics = [...new Set(curves.flatMap(Object.keys))];
  const range = stepRange(curves.flatMap(Object.values));
  const panel = (metric) => html`<${CurvePanel} key=${`${metric} ${known.join()}`} metric=${metric} names=${known}
    range=${range} curves=${curves.map((found) => found[metric])} view=${view} />`;
  return html`<${Section} title="Compared" label="comparison">
    <${Legend} entries=${known.map((run) => [background(runs.indexOf(run)), run])} />
    <p class="tools">
      <${Search} label="metrics, such as eval/*,loss" value=${names} onChange=${(metrics) => change({ metrics })} />
      <${CurveControls} parameters=${parameters} change=${change} />
    </p>
    ${error && html`<${Waiting} error=${error} />`}
    <div class="panels">${metrics.map(panel)}</div>
  <//>`;
}

/** The options that differ between runs. */
function OptionsThatDiffer({ runs }) {
  const [found, setFound] = useState({});
  useEffect(() => {
    const control = new AbortController();
    Promise.all(runs.map((run) => ask("run", { run }, control.signal)))
      .then((pages) => setFound(Object.fromEntries(pages.map(({ options }, place) => [runs[place], options]))))
      .catch((failure) => failure.name !== "AbortError" && console.error(failure));
    return () => control.abort();
  }, [runs.join("\n")]);
  const known = runs.filter((run) => found[run]);
  const valuesOf = ({ option, value }) => Object.fromEntries(option.map((name, at) => [name, optionText(value[at])]));
  const values = known.map((run) => valuesOf(found[run]));
  const names = [...new Set(values.flatMap(Object.keys))];
  const rows = names
    .filter((name) => new Set(values.map((of) => of[name])).size > 1)
    .map((name) => ({ name, ...Object.fromEntries(known.map((run, place) => [`of ${run}`, values[place][name]])) }));
  if (known.length < 2) return null;
  const cell = (name) => (row) => html`<code>${row[name] ?? "–"}</code>`;
  const columns = [
    { name: "name", heading: "option", cell: cell("name") },
    ...known.map((run) => ({ name: `of ${run}`, heading: run, cell: cell(`of ${run}`) })),
  ];
  return html`<${Section} title="Options that differ">
    ${rows.length ? html`<${SortedTable} caption="options that differ" columns=${columns} rows=${rows} />` : "None."}
  <//>`;
}

const NONE = html`<p>
  There are no runs here yet. A run that starts appears here by itself. <code>etude demo</code> makes one in runs/.
</p>`;

export function RunsPage() {
  const [parameters, change] = useParameters();
  const { record, error } = useQuery("runs", {}, true);
  const filter = parameters.filter ?? "";
  const compared = useMemo(() => (parameters.compare ? parameters.compare.split("\n") : []), [parameters.compare]);
  const rows = useMemo(() => (record ? rowsOf(record) : []), [record]);
  const matching = useMemo(() => {
    const matches = matcher(filter);
    return rows.filter((row) => matches(`${row.run} ${row.status} ${row.model} ${row.recipe}`));
  }, [rows, filter]);
  if (!record) return html`<${Waiting} error=${error} />`;
  const choose = (run) => {
    const next = compared.includes(run) ? compared.filter((other) => other !== run) : [...compared, run];
    change({ compare: next.slice(-MOST_COMPARED).join("\n") });
  };
  const runCell = (row) => html`<${RunCell} row=${row} order=${compared.indexOf(row.run)} onChoose=${choose} />`;
  const stepCell = ({ step, steps }) =>
    html`${number(step)}${steps != null && html`<small class="muted"> / ${number(steps)}</small>`}`;
  const score = (row) => html`<span title=${row.score_name}>${number(row.score)}</span>`;
  const columns = [
    { name: "run", cell: runCell },
    { name: "status", cell: (row) => html`<${Status} status=${row.status} />` },
    { name: "recipe" },
    { name: "model" },
    { name: "step", numeric: true, cell: stepCell },
    { name: "reward", numeric: true },
    { name: "loss", numeric: true },
    { name: "score", numeric: true, cell: score },
    {
      name: "written_at",
      heading: "last write",
      cell: (row) => html`<span title=${moment(row.written_at)}>${ago(row.written_at)}</span>`,
    },
    { name: "message", heading: "last words", cell: (row) => html`<${Words} text=${row.message} />` },
  ];
  const table = html`<${SortedTable} caption="runs" columns=${columns} rows=${matching} sort=${parameters.sort ?? ""}
    onSort=${(sort) => change({ sort })} />`;
  return html`<main>
    <h1>Runs</h1>
    ${error && html`<${Waiting} error=${error} />`}
    <p class="tools">
      <${Search} hasKey label="filter runs" value=${filter} onChange=${(text) => change({ filter: text })} />
      <span class="muted">${matching.length} of ${rows.length}; choose some to compare</span>
      <${Downloads} path="runs" parameters=${{}} csv />
    </p>
    ${rows.length ? table : NONE}
    ${
      compared.length > 0 &&
      html`<${Comparison} runs=${compared} parameters=${parameters} change=${change} />
        <${OptionsThatDiffer} runs=${compared} />`
    }
  </main>`;
}
