// The page of all runs: a table, and the curves of those that are chosen.

import {
  Downloads,
  Search,
  SortedTable,
  Status,
  Waiting,
  address,
  ago,
  ask,
  html,
  matcher,
  moment,
  number,
  rowsOf,
  useEffect,
  useMemo,
  useParameters,
  useQuery,
  useState,
} from "./base.js";
import { CurvePanel, seriesColour, stepRange } from "./charts.js";

const MOST_COMPARED = 8;

function RunCell({ row, order, onChoose }) {
  const chosen = order >= 0;
  return html`<span class="run-name">
    <input type="checkbox" checked=${chosen} aria-label=${`compare ${row.run}`} onChange=${() => onChoose(row.run)} />
    ${chosen && html`<i class="dot" style=${{ background: seriesColour(order) }}></i>`}
    <a href=${address("run", { run: row.run })}>${row.run}</a>
  </span>`;
}

/** The curves of several runs in the same panels. */
function Comparison({ runs, names, onNames }) {
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
  const metrics = [...new Set(known.flatMap((run) => Object.keys(found[run].curves)))];
  const range = stepRange(known.flatMap((run) => Object.values(found[run].curves)));
  return html`<section aria-label="comparison">
    <h2>Compared</h2>
    <p class="legend">
      ${known.map(
        (run) => html`<span><i class="dot" style=${{ background: seriesColour(runs.indexOf(run)) }}></i>${run}</span>`,
      )}
    </p>
    <p><${Search} label="metrics, such as eval/*,loss" value=${names} onChange=${onNames} /></p>
    ${error && html`<${Waiting} error=${error} />`}
    <div class="panels">
      ${metrics.map(
        (metric) =>
          html`<${CurvePanel}
            key=${`${metric} ${known.join()}`}
            metric=${metric}
            names=${known}
            range=${range}
            curves=${known.map((run) => found[run].curves[metric])}
          />`,
      )}
    </div>
  </section>`;
}

export function RunsPage() {
  const [parameters, change] = useParameters();
  const { record, error } = useQuery("runs", {}, 5);
  const filter = parameters.filter ?? "";
  const compared = useMemo(() => (parameters.compare ? parameters.compare.split("\n") : []), [parameters.compare]);
  const rows = useMemo(() => (record ? rowsOf(record).map((row) => ({ ...row, key: row.run })) : []), [record]);
  const matching = useMemo(() => {
    const matches = matcher(filter);
    return rows.filter((row) => matches(`${row.run} ${row.status} ${row.model} ${row.recipe}`));
  }, [rows, filter]);
  if (!record) return html`<${Waiting} error=${error} />`;
  const choose = (run) => {
    const next = compared.includes(run) ? compared.filter((other) => other !== run) : [...compared, run];
    change({ compare: next.slice(-MOST_COMPARED).join("\n") });
  };
  const columns = [
    {
      name: "run",
      heading: "run",
      cell: (row) => html`<${RunCell} row=${row} order=${compared.indexOf(row.run)} onChoose=${choose} />`,
    },
    { name: "status", heading: "status", cell: (row) => html`<${Status} status=${row.status} />` },
    { name: "recipe", heading: "recipe" },
    { name: "model", heading: "model" },
    {
      name: "step",
      heading: "step",
      numeric: true,
      cell: (row) =>
        html`${number(row.step)}${row.steps != null && html`<small class="muted"> / ${number(row.steps)}</small>`}`,
    },
    { name: "reward", heading: "reward", numeric: true },
    { name: "loss", heading: "loss", numeric: true },
    {
      name: "score",
      heading: "score",
      numeric: true,
      cell: (row) => html`<span title=${row.score_name}>${number(row.score)}</span>`,
    },
    {
      name: "written_at",
      heading: "last write",
      cell: (row) => html`<span title=${moment(row.written_at)}>${ago(row.written_at)}</span>`,
    },
    {
      name: "message",
      heading: "last words",
      cell: (row) => html`<span class="words" title=${row.message}>${row.message}</span>`,
    },
  ];
  return html`<main>
    <h1>Runs</h1>
    ${error && html`<${Waiting} error=${error} />`}
    <p class="tools">
      <${Search} hasKey label="filter runs" value=${filter} onChange=${(text) => change({ filter: text })} />
      <span class="muted">${matching.length} of ${rows.length}; choose some to compare</span>
      <${Downloads} path="runs" parameters=${{}} csv />
    </p>
    ${
      rows.length === 0
        ? html`<p>There are no runs here yet. <code>etude demo</code> makes one in runs/.</p>`
        : html`<${SortedTable}
            caption="runs"
            columns=${columns}
            rows=${matching}
            sort=${parameters.sort ?? ""}
            onSort=${(sort) => change({ sort })}
          />`
    }
    ${
      compared.length > 0 &&
      html`<${Comparison}
        runs=${compared}
        names=${parameters.metrics ?? ""}
        onNames=${(names) => change({ metrics: names })}
      />`
    }
  </main>`;
}
