// The page of one run: its curves with what happened, where its time goes, its options, sessions and checkpoints.

import { address, Downloads, Facts, ForPrograms, Legend, rowsOf, Search, Section } from "./base.js";
import { SortedTable, Status, searchLink, stepLink, useParameters, useQuery, Waiting, Words } from "./base.js";
import { arrange, CurveControls, CurvePanel, MARKS, StackedTimes, stepRange } from "./charts.js";
import { LanesView } from "./lanes.js";
import { ago, duration, matcher, mean, moment, number, optionText } from "./text.js";
import { html, useMemo, useState } from "./vendor/preact-htm.js";

const isRunning = ({ summary }) => summary.status === "running" || summary.status === "silent";
const FIRST_STEPS = 20;
const THROUGHPUT = {
  sampled_tokens_per_second: "sampled tokens / s",
  trained_tokens_per_second: "trained tokens / s",
  mfu: "model FLOPs utilization",
  device_utilization: "device utilization",
  peak_memory_gb: "peak memory, GB",
  "engine/cache_hit_rate": "cached prompt tokens",
};
const PLACED = "placement\\.|mesh\\.|ranks|crew|cluster|device|threads|max_staleness";
const PLACED_TOO = "rollout\\.(name|servers|gpus)|train\\.(engine|precision|offload)";
const PLACEMENT = new RegExp(`^(${PLACED}|${PLACED_TOO})`);

const PICKS = ["worst", "best", "random"];
const CHANGE = { name: "change", heading: "change of reward", numeric: true };

const codeCell = (name) => (row) => html`<code>${row[name]}</code>`;
const tickCell = (name) => (row) => (row[name] ? "✓" : "");

function Head({ page: { summary, preset, rollouts, marks, problems, directory, resume } }) {
  const facts = [
    ["model", summary.model],
    ["recipe", [summary.recipe, preset].filter(Boolean).join(", preset ")],
    ["step", `${number(summary.step)}${summary.steps == null ? "" : ` of ${number(summary.steps)}`}`],
    ["reward", number(summary.reward)],
    [summary.score_name || "score", number(summary.score)],
    ["rollouts trained on", number(rollouts)],
    ["began", moment(summary.began_at)],
    ["last write", ago(summary.written_at)],
  ];
  const isEvaluated = marks.some(({ kind }) => kind === "evaluation");
  const picked = (pick) => html`<a href=${address("rollout", { run: summary.run, pick })}>${pick}</a> `;
  return html`<h1>${summary.run} <${Status} status=${summary.status} /></h1>
    ${summary.message && html`<pre class="problem">${summary.message}</pre>`}
    ${resume && html`<p class="resume">${resume}</p>`}
    ${problems.map((problem) => html`<p class="problem" role="alert">${problem}</p>`)}
    <${Facts} facts=${facts} />
    <p class="tools">
      <span class="muted path">${directory}</span>
      ${rollouts != null && html`<a href=${address("store", { run: summary.run })}>rollout queue</a>`}
      ${rollouts > 0 && html`<span>rollouts of the last step: ${PICKS.map(picked)}</span>`}
      ${rollouts != null && isEvaluated && html`<a href=${address("evaluation", { run: summary.run })}>evaluations</a>`}
    </p>`;
}

/** A sentence with its options as code. */
const withCode = (text) => text.split("`").map((part, place) => (place % 2 ? html`<code>${part}</code>` : part));

function FindingsSection({ run, findings, hasSteps }) {
  if (!findings.length) return null;
  const steps = ({ first, last }) =>
    html`${stepLink(run, first, `step ${first}`)}, ${stepLink(run, last, `step ${last}`)},
      ${" "}${searchLink(run, `step=${first}`, "rollouts")}, `;
  const finding = (found) => html`<li class=${found.cause ? "muted" : ""}>
    <strong>${found.rule}</strong>: ${withCode(found.what)} ${withCode(found.remedy)}
    ${" "}<small>${hasSteps && steps(found)}
      <a href=${address("run", { run, metrics: Object.keys(found.numbers).join() })}>curves</a></small>
  </li>`;
  return html`<${Section} title="Findings"><ul>${findings.map(finding)}</ul><//>`;
}

function CurvesSection({ run, live, marks, parameters, change }) {
  const wanted = parameters.metrics ?? "";
  const [names, setNames] = useState([]);
  const matching = useMemo(() => (wanted ? names.filter(matcher(wanted)).slice(0, 48) : []), [names, wanted]);
  const query = { run, names: matching.join(",") };
  const { record, error } = useQuery("curves", query, live);
  if (record && record.names.join() !== names.join()) setNames(record.names);
  const { view, marks: placed, curves: all } = arrange(record ? [record] : [], parameters, marks);
  const curves = Object.entries(all[0] ?? {}).filter(([, curve]) => curve.steps.length);
  const range = stepRange(curves.map(([, curve]) => curve));
  const panel = ([metric, curve]) => html`<${CurvePanel} key=${metric} metric=${metric} names=${[run]} curves=${[curve]}
    range=${range} marks=${placed} view=${view} />`;
  const kinds = Object.keys(MARKS).filter((kind) => marks.some((mark) => mark.kind === kind));
  return html`<${Section} title="Curves">
    <p class="tools">
      <${Search} hasKey label="search all metrics" value=${wanted} onChange=${(metrics) => change({ metrics })} />
      <span class="muted">${wanted ? `${matching.length} of ` : ""}${names.length} metrics</span>
      <${CurveControls} parameters=${parameters} change=${change} />
      <${Downloads} path="curves" parameters=${query} />
    </p>
    <${Legend} mark="dash" entries=${kinds.map((kind) => [`var(--${MARKS[kind][1]})`, MARKS[kind][0]])} />
    ${(error || !record) && html`<${Waiting} error=${error} />`}
    ${record && wanted && !matching.length && html`<p>No metric of this run has “${wanted}” in its name.</p>`}
    <div class="panels">${curves.map(panel)}</div>
  <//>`;
}

function StepsSection({ run, live }) {
  const [all, setAll] = useState(false);
  const { record } = useQuery("steps", { run }, live);
  if (!record?.rollouts.some((count) => count != null)) return null;
  const change = (row, before) => (row.reward == null || before?.reward == null ? null : row.reward - before.reward);
  const rows = rowsOf(record).map((row, place, all) => ({ ...row, change: change(row, all[place - 1]) }));
  const shown = all ? rows : rows.slice(-FIRST_STEPS);
  const names = Object.keys(record).filter((name) => name !== "step" && record[name].some((value) => value != null));
  const columns = [
    { name: "step", numeric: true, cell: (row) => stepLink(run, row.step) },
    ...names.flatMap((name) => (name === "reward" ? [{ name, numeric: true }, CHANGE] : [{ name, numeric: true }])),
  ];
  return html`<${Section} title="Steps">
    <p class="tools">
      <span class="muted">${shown.length} of ${rows.length}</span>
      ${rows.length > FIRST_STEPS && html`<button onClick=${() => setAll(!all)}>${all ? "newest" : "all"}</button>`}
      <${Downloads} path="steps" parameters=${{ run }} csv />
      <span class="muted">A step has the reward of the policy before its update.</span>
    </p>
    <${SortedTable} caption="steps" columns=${columns} rows=${shown} start="-step" />
  <//>`;
}

function TimesSection({ run, live }) {
  const { record, error } = useQuery("times", { run }, live);
  if (record && !error && !record.step.length) return null;
  return html`<${Section} title="Time by step" beside=${html`<${Downloads} path="times" parameters=${{ run }} csv />`}>
    ${error || !record ? html`<${Waiting} error=${error} />` : html`<${StackedTimes} table=${record} />`}
  <//>`;
}

function ThroughputSection({ run, live, options }) {
  const { record } = useQuery("curves", { run, names: Object.keys(THROUGHPUT).join(",") }, live);
  const facts = Object.entries(THROUGHPUT).map(([name, title]) => {
    const values = record?.curves[name]?.values ?? [];
    const value = html`${number(values.at(-1))} <small>mean ${number(mean(values))}</small>`;
    return [title, values.length ? value : null, name];
  });
  const option = ({ option, value, is_default }) =>
    html`<code class=${is_default ? "muted" : ""}>${option}=${optionText(value)}</code> `;
  return html`<${Section} title="Placement and throughput">
    <${Facts} facts=${facts} />
    <p class="options">${options.filter((row) => PLACEMENT.test(row.option)).map(option)}</p>
  <//>`;
}

function OptionsSection({ rows, preset }) {
  const [all, setAll] = useState(false);
  const [filter, setFilter] = useState("");
  const matches = matcher(filter);
  const shown = rows.filter((row) => (all || filter || !row.is_default) && matches(row.option));
  const value = (row) => html`<code class=${row.is_default ? "" : "changed"}>${optionText(row.value)}</code>`;
  const byDefault = (row) => html`<code class="muted">${row.is_default ? "" : optionText(row.default)}</code>`;
  const columns = [
    { name: "option", cell: codeCell("option") },
    { name: "value", cell: value },
    { name: "default", cell: byDefault },
    { name: "from_preset", heading: preset ? `in ${preset}` : "preset", cell: tickCell("from_preset") },
  ];
  const box = html`<input type="checkbox" checked=${all} onChange=${() => setAll(!all)} />`;
  return html`<${Section} title="Options">
    <p class="tools">
      <${Search} label="search options" value=${filter} onChange=${setFilter} />
      <label>${box} also those with their default</label>
      <span class="muted">${shown.length} of ${rows.length}</span>
    </p>
    <${SortedTable} caption="options" columns=${columns} rows=${shown} />
  <//>`;
}

function SessionsSections({ page: { sessions, checkpoints, summary } }) {
  const howOf = (session, index) => session.how ?? (index + 1 < sessions.length ? "killed" : summary.status);
  const rows = sessions.map((session, index) => ({ ...session, how: howOf(session, index) }));
  const versions = (row) => Object.entries(row.versions).map((pair) => pair.join(" "));
  const took = ({ began_at, ended_at }) => (ended_at ? duration(ended_at - began_at) : "");
  const columns = [
    { name: "began_at", heading: "began", cell: (row) => moment(row.began_at) },
    { name: "took", sortable: false, cell: took },
    { name: "first_step", heading: "after step", numeric: true },
    { name: "last_step", heading: "to step", numeric: true },
    { name: "how", heading: "end", cell: (row) => html`<${Status} status=${row.how} />` },
    { name: "host", heading: "machine" },
    { name: "device" },
    { name: "versions", sortable: false, cell: (row) => html`<${Words} text=${versions(row).join(", ")} />` },
    { name: "message", heading: "last words", cell: (row) => html`<${Words} text=${row.message} />` },
  ];
  const saved = [
    { name: "step", numeric: true },
    { name: "name", heading: "checkpoint", cell: codeCell("name") },
    { name: "is_best", heading: "best", cell: tickCell("is_best") },
  ];
  const table = (caption, columns, rows, none) =>
    rows.length
      ? html`<${SortedTable} caption=${caption} columns=${columns} rows=${rows} />`
      : html`<p class="muted">${none}</p>`;
  const unknown = "No session was recorded, as in a run that `etude replay` trained.";
  return html`<${Section} title="Sessions">${table("sessions", columns, rows, unknown)}<//>
    <${Section} title="Checkpoints">${table("checkpoints", saved, checkpoints, "There is no checkpoint.")}<//>`;
}

export function RunPage() {
  const [parameters, change] = useParameters();
  const run = parameters.run ?? "";
  const { record: page, error } = useQuery("run", { run }, true); // a run that has ended may be resumed
  const options = useMemo(() => (page ? rowsOf(page.options) : []), [page?.options.option.length]);
  if (!page) return html`<main><${Waiting} error=${error} /></main>`;
  const common = { run, live: isRunning(page), parameters, change };
  return html`<main>
    <${Head} page=${page} />
    ${error && html`<${Waiting} error=${error} />`}
    <${FindingsSection} run=${run} findings=${page.findings} hasSteps=${page.rollouts != null} />
    <${CurvesSection} ...${common} marks=${page.marks} />
    <${StepsSection} ...${common} />
    <${TimesSection} ...${common} />
    <${LanesView} ...${common} step=${page.summary.step} />
    <${ThroughputSection} ...${common} options=${options} />
    <${SessionsSections} page=${page} />
    <${OptionsSection} rows=${options} preset=${page.preset} />
    <${ForPrograms} path="run" parameters=${{ run }} />
  </main>`;
}
