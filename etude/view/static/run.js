// The page of one run: its curves with what happened, where its time goes, its options, sessions and checkpoints.

import {
  Downloads,
  Search,
  SortedTable,
  Status,
  Waiting,
  address,
  ago,
  duration,
  html,
  matcher,
  moment,
  number,
  optionText,
  rowsOf,
  useMemo,
  useParameters,
  useQuery,
  useState,
} from "./base.js";
import { CurvePanel, MARKS, StackedTimes, stepRange } from "./charts.js";
import { LanesView } from "./lanes.js";

const REFRESH_S = 5;
const FIRST_STEPS = 20;
const THROUGHPUT = [
  ["sampled_tokens_per_second", "sampled tokens / s"],
  ["trained_tokens_per_second", "trained tokens / s"],
  ["mfu", "model FLOPs utilization"],
  ["device_utilization", "device utilization"],
  ["peak_memory_gb", "peak memory, GB"],
  ["engine/cache_hit_rate", "cached prompt tokens"],
];
const PLACED = [
  "placement.",
  "mesh.",
  "ranks",
  "crew",
  "cluster",
  "device",
  "threads",
  "max_staleness",
  "rollout.name",
];
const PLACED_TOO = ["rollout.servers", "rollout.gpus", "train.engine", "train.precision", "train.offload"];
const isPlacement = (option) => [...PLACED, ...PLACED_TOO].some((start) => option.startsWith(start));

function Head({ page }) {
  const { summary } = page;
  const facts = [
    ["model", summary.model],
    ["recipe", [summary.recipe, page.preset].filter(Boolean).join(", preset ")],
    ["step", `${number(summary.step)}${summary.steps == null ? "" : ` of ${number(summary.steps)}`}`],
    ["reward", number(summary.reward)],
    [summary.score_name || "score", number(summary.score)],
    ["rollouts trained on", number(page.rollouts)],
    ["began", moment(summary.began_at)],
    ["last write", ago(summary.written_at)],
  ];
  return html`<header>
    <h1>${summary.run} <${Status} status=${summary.status} /></h1>
    ${summary.message && html`<pre class="problem">${summary.message}</pre>`}
    ${page.problems.map((problem) => html`<p class="problem" role="alert">${problem}</p>`)}
    <dl class="facts">
      ${facts
        .filter(([, value]) => value)
        .map(
          ([name, value]) =>
            html`<div>
              <dt>${name}</dt>
              <dd>${value}</dd>
            </div>`,
        )}
    </dl>
    <p class="muted path">${page.directory}</p>
  </header>`;
}

function CurvesSection({ run, live, marks, parameters, change }) {
  const wanted = parameters.metrics ?? "";
  const every = live ? REFRESH_S : 0;
  const [names, setNames] = useState([]);
  const matching = useMemo(() => {
    const matches = matcher(wanted);
    return wanted ? names.filter(matches).slice(0, 48) : [];
  }, [names, wanted]);
  const { record, error } = useQuery("curves", { run, names: matching.join(",") }, every);
  if (record && record.names.join() !== names.join()) setNames(record.names);
  const range = stepRange(record ? Object.values(record.curves) : []);
  const kinds = Object.keys(MARKS).filter((kind) => marks.some((mark) => mark.kind === kind));
  return html`<section aria-label="curves">
    <h2>Curves</h2>
    <p class="tools">
      <${Search} hasKey label="search all metrics" value=${wanted} onChange=${(metrics) => change({ metrics })} />
      <span class="muted">${wanted ? `${matching.length} of ` : ""}${names.length} metrics</span>
      <${Downloads} path="curves" parameters=${{ run, names: matching.join(",") }} />
    </p>
    <p class="legend">${kinds.map((kind) => html`<span><i class=${`dash mark-${kind}`}></i>${MARKS[kind]}</span>`)}</p>
    ${error && html`<${Waiting} error=${error} />`} ${!record && !error && html`<${Waiting} />`}
    ${record && wanted && !matching.length && html`<p>No metric of this run has “${wanted}” in its name.</p>`}
    ${
      record &&
      html`<div class="panels">
        ${Object.entries(record.curves)
          .filter(([, curve]) => curve.steps.length)
          .map(
            ([metric, curve]) =>
              html`<${CurvePanel}
                key=${metric}
                metric=${metric}
                names=${[run]}
                curves=${[curve]}
                range=${range}
                marks=${marks}
              />`,
          )}
      </div>`
    }
  </section>`;
}

function StepsSection({ run, live }) {
  const [all, setAll] = useState(false);
  const { record } = useQuery("steps", { run }, live ? REFRESH_S : 0);
  if (!record?.rollouts.some((count) => count != null)) return null;
  const rows = rowsOf(record).map((row) => ({ ...row, key: row.step }));
  const names = Object.keys(record).filter((name) => name !== "step" && record[name].some((value) => value != null));
  const columns = [
    {
      name: "step",
      heading: "step",
      numeric: true,
      cell: (row) => html`<a href=${address("step", { run, step: row.step })}>${row.step}</a>`,
    },
    ...names.map((name) => ({ name, heading: name, numeric: true })),
  ];
  return html`<section aria-label="steps">
    <h2>Steps</h2>
    <p class="tools">
      <span class="muted">${all ? rows.length : Math.min(rows.length, FIRST_STEPS)} of ${rows.length}</span>
      ${rows.length > FIRST_STEPS && html`<button onClick=${() => setAll(!all)}>${all ? "newest" : "all"}</button>`}
      <${Downloads} path="steps" parameters=${{ run }} csv />
    </p>
    <${SortedTable} caption="steps" columns=${columns} rows=${all ? rows : rows.slice(-FIRST_STEPS)} start="-step" />
  </section>`;
}

function TimesSection({ run, live }) {
  const { record, error } = useQuery("times", { run }, live ? REFRESH_S : 0);
  if (error || !record)
    return html`<section>
      <h2>Time by step</h2>
      <${Waiting} error=${error} />
    </section>`;
  if (!record.step.length) return null;
  return html`<section aria-label="time by step">
    <h2>Time by step <${Downloads} path="times" parameters=${{ run }} csv /></h2>
    <${StackedTimes} table=${record} />
  </section>`;
}

function ThroughputSection({ run, live, options }) {
  const { record } = useQuery(
    "curves",
    { run, names: THROUGHPUT.map(([name]) => name).join(",") },
    live ? REFRESH_S : 0,
  );
  const placed = options.filter((row) => isPlacement(row.option));
  const measured = THROUGHPUT.filter(([name]) => record?.curves[name]?.values.length);
  return html`<section aria-label="placement and throughput">
    <h2>Placement and throughput</h2>
    <dl class="facts">
      ${measured.map(([name, title]) => {
        const values = record.curves[name].values;
        const mean = values.reduce((sum, value) => sum + value, 0) / values.length;
        return html`<div title=${name}>
          <dt>${title}</dt>
          <dd>${number(values.at(-1))} <small class="muted">mean ${number(mean)}</small></dd>
        </div>`;
      })}
    </dl>
    <p class="options">
      ${placed.map(
        (row) => html`<code class=${row.is_default ? "muted" : ""}>${row.option}=${optionText(row.value)}</code> `,
      )}
    </p>
  </section>`;
}

function OptionsSection({ rows, preset }) {
  const [all, setAll] = useState(false);
  const [filter, setFilter] = useState("");
  const matches = matcher(filter);
  const shown = rows.filter((row) => (all || filter || !row.is_default) && matches(row.option));
  const columns = [
    { name: "option", heading: "option", cell: (row) => html`<code>${row.option}</code>` },
    {
      name: "value",
      heading: "value",
      cell: (row) => html`<code class=${row.is_default ? "" : "changed"}>${optionText(row.value)}</code>`,
    },
    {
      name: "default",
      heading: "default",
      cell: (row) => html`<code class="muted">${row.is_default ? "" : optionText(row.default)}</code>`,
    },
    { name: "from_preset", heading: preset ? `in ${preset}` : "preset", cell: (row) => (row.from_preset ? "✓" : "") },
  ];
  return html`<section aria-label="options">
    <h2>Options</h2>
    <p class="tools">
      <${Search} label="search options" value=${filter} onChange=${setFilter} />
      <label
        ><input type="checkbox" checked=${all} onChange=${() => setAll(!all)} /> also those with their default</label
      >
      <span class="muted">${shown.length} of ${rows.length}</span>
    </p>
    <${SortedTable} caption="options" columns=${columns} rows=${shown} />
  </section>`;
}

function SessionsSection({ page }) {
  const sessions = page.sessions.map((session, index) => ({
    ...session,
    key: index,
    how: session.how ?? (index + 1 < page.sessions.length ? "killed" : page.summary.status),
  }));
  const columns = [
    { name: "began_at", heading: "began", cell: (row) => moment(row.began_at) },
    {
      name: "took",
      heading: "took",
      sortable: false,
      cell: (row) => (row.ended_at ? duration(row.ended_at - row.began_at) : ""),
    },
    { name: "first_step", heading: "after step", numeric: true },
    { name: "last_step", heading: "to step", numeric: true },
    { name: "how", heading: "end", cell: (row) => html`<${Status} status=${row.how} />` },
    { name: "host", heading: "machine" },
    {
      name: "message",
      heading: "last words",
      cell: (row) => html`<span class="words" title=${row.message}>${row.message}</span>`,
    },
  ];
  const saved = [
    { name: "step", heading: "step", numeric: true },
    { name: "name", heading: "checkpoint", cell: (row) => html`<code>${row.name}</code>` },
    { name: "is_best", heading: "best", cell: (row) => (row.is_best ? "✓" : "") },
  ];
  return html`<section aria-label="sessions and checkpoints">
    <h2>Sessions</h2>
    ${
      sessions.length
        ? html`<${SortedTable} caption="sessions" columns=${columns} rows=${sessions} />`
        : html`<p class="muted">No session was recorded: an earlier version of Etude wrote this run.</p>`
    }
    <h2>Checkpoints</h2>
    ${
      page.checkpoints.length
        ? html`<${SortedTable}
            caption="checkpoints"
            columns=${saved}
            rows=${page.checkpoints.map((row) => ({ ...row, key: row.name }))}
          />`
        : html`<p class="muted">There is no checkpoint.</p>`
    }
  </section>`;
}

export function RunPage() {
  const [parameters, change] = useParameters();
  const run = parameters.run ?? "";
  const [live, setLive] = useState(true);
  const { record: page, error } = useQuery("run", { run }, live ? REFRESH_S : 0);
  const running = page == null || page.summary.status === "running" || page.summary.status === "silent";
  if (live !== running) setLive(running);
  const options = useMemo(
    () => (page ? rowsOf(page.options).map((row) => ({ ...row, key: row.option })) : []),
    [page?.options.option.length],
  );
  if (!page) return html`<main><${Waiting} error=${error} /></main>`;
  return html`<main>
    <${Head} page=${page} />
    ${error && html`<${Waiting} error=${error} />`}
    <${CurvesSection} run=${run} live=${live} marks=${page.marks} parameters=${parameters} change=${change} />
    <${StepsSection} run=${run} live=${live} />
    <${TimesSection} run=${run} live=${live} />
    <${LanesView} run=${run} live=${live} step=${page.summary.step} parameters=${parameters} change=${change} />
    <${ThroughputSection} run=${run} live=${live} options=${options} />
    <${SessionsSection} page=${page} />
    <${OptionsSection} rows=${options} preset=${page.preset} />
    <p class="tools muted">
      <span>for programs: this page</span> <${Downloads} path="run" parameters=${{ run }} />
    </p>
  </main>`;
}
