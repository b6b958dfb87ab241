// The page of one step: its rewards as a histogram, and its groups and rollouts, trained on or not.

import {
  Downloads,
  SortedTable,
  Waiting,
  address,
  html,
  number,
  rowsOf,
  useMemo,
  useParameters,
  useQuery,
} from "./base.js";
import { Facts } from "./rollout.js";
import { visible } from "./tokens.js";

const BINS = 20;
const HEADLINE = /^(loss|grad_norm|entropy|.*clip_share|.*kl|(mismatch|correction|staleness)\/.*)$/;

/** Bins of equal width over the rewards; few different rewards have a bin each. */
function binsOf(rewards) {
  const different = [...new Set(rewards)].sort((left, right) => left - right);
  if (different.length <= BINS) return different.map((value) => ({ low: value, high: value, title: number(value) }));
  const [low, high] = [different[0], different.at(-1)];
  const at = (index) => low + ((high - low) * index) / BINS;
  return Array.from({ length: BINS }, (_, index) => ({
    low: at(index),
    high: index + 1 < BINS ? at(index + 1) : high,
    open: index + 1 < BINS,
    title: `${number(at(index))} to ${number(at(index + 1))}`,
  }));
}

const inBin = (reward, bin) =>
  reward != null && reward >= bin.low && (bin.open ? reward < bin.high : reward <= bin.high);

function Histogram({ rows, bins, chosen, onChoose }) {
  const counts = bins.map((bin) => rows.filter((row) => inBin(row.reward, bin)));
  const most = Math.max(1, ...counts.map((found) => found.length));
  return html`<div class="histogram" role="group" aria-label="rewards">
    ${bins.map((bin, index) => {
      const trained = counts[index].filter((row) => row.in_batch).length;
      const rest = counts[index].length - trained;
      const height = (count) => ({ height: `${(100 * count) / most}%` });
      const label = `reward ${bin.title}: ${trained} rollouts trained on, ${rest} others`;
      return html`<button
        aria-pressed=${index === chosen ? "true" : "false"}
        aria-label=${label}
        title=${label}
        onClick=${() => onChoose(index === chosen ? "" : String(index))}
      >
        <span class="bars"
          ><i class="others" style=${height(rest)}></i><i class="series-1" style=${height(trained)}></i
        ></span>
        <small>${number(bin.low)}</small>
      </button>`;
    })}
  </div>`;
}

const mean = (values) => (values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null);
const most = (values) => values.reduce((found, value) => (found == null || value > found ? value : found), null);

/** The trained, the finished but dropped, and the other rollouts beside each other. */
function Kinds({ rows }) {
  const rest = (row) => (row.status === "succeeded" ? "dropped" : "failed or unfinished");
  const kindOf = (row) => (row.in_batch ? "trained on" : rest(row));
  const table = ["trained on", "dropped", "failed or unfinished"].map((kind) => {
    const found = rows.filter((row) => kindOf(row) === kind);
    const of = (name) => found.map((row) => row[name]).filter((value) => value != null);
    return {
      key: kind,
      kind,
      rollouts: found.length,
      reward: mean(of("reward")),
      tokens: mean(of("tokens")),
      longest: most(of("tokens")),
      truncated: found.length ? `${number((100 * found.filter((row) => row.truncated).length) / found.length)} %` : "",
      oldest: mean(of("oldest_version")),
      staleness: mean(of("staleness")),
      stalest: most(of("staleness")),
    };
  });
  const headings = {
    rollouts: "rollouts",
    reward: "mean reward",
    tokens: "mean tokens",
    longest: "most tokens",
    truncated: "truncated",
    oldest: "mean oldest version",
    staleness: "mean staleness",
    stalest: "most staleness",
  };
  const ofNumbers = { numeric: true, sortable: false };
  const columns = Object.entries(headings).map(([name, heading]) => ({ name, heading, ...ofNumbers }));
  return html`<${SortedTable}
    caption="rollouts by their end"
    columns=${[{ name: "kind", heading: "rollouts that were", sortable: false }, ...columns]}
    rows=${table}
  />`;
}

const taskColumn = (run) => ({
  name: "task",
  heading: "task",
  cell: (row) => html`<a href=${address("group", { run, task: row.task })}>${row.task}</a>`,
});

function Groups({ run, table }) {
  const rows = rowsOf(table).map((row) => ({ ...row, key: row.task }));
  const level = rows.filter((row) => row.zero_variance);
  const sum = (found, name) => found.reduce((total, row) => total + row[name], 0);
  const share = (100 * sum(level, "tokens")) / Math.max(1, sum(rows, "tokens"));
  const columns = [
    taskColumn(run),
    {
      name: "prompt",
      heading: "prompt",
      cell: (row) => html`<span class=${`words ${row.zero_variance ? "struck" : ""}`}>${visible(row.prompt)}</span>`,
    },
    { name: "reward", heading: "mean reward", numeric: true },
    { name: "low", heading: "lowest", numeric: true },
    { name: "high", heading: "highest", numeric: true },
    { name: "rollouts", heading: "rollouts", numeric: true },
    { name: "in_batch", heading: "trained on", numeric: true },
    { name: "failed", heading: "failed", numeric: true },
    { name: "tokens", heading: "tokens", numeric: true },
    { name: "dropped", heading: "dropped for", cell: (row) => visible(row.dropped) },
  ];
  const cost = `${number(sum(level, "rollouts"))} rollouts and ${number(sum(level, "tokens"))} tokens`;
  return html`<section aria-label="groups">
    <h2>Groups</h2>
    ${
      level.length > 0 &&
      html`<p class="cost">
        ${level.length} of ${rows.length} groups have equal rewards and are struck through. They cost ${cost},
        ${" "}${number(share)} % of the step's sampled tokens.
      </p>`
    }
    <${SortedTable} caption="groups" columns=${columns} rows=${rows} />
  </section>`;
}

function Rollouts({ run, rows }) {
  const columns = [
    {
      name: "rollout",
      heading: "rollout",
      cell: (row) => html`<a href=${address("rollout", { run, rollout: row.rollout })}>${row.rollout}</a>`,
    },
    taskColumn(run),
    { name: "status", heading: "status" },
    { name: "reward", heading: "reward", numeric: true },
    ...Object.keys(rows[0] ?? {})
      .filter((name) => name.startsWith("reward/"))
      .map((name) => ({ name, heading: visible(name), numeric: true })),
    { name: "turns", heading: "turns", numeric: true },
    { name: "tokens", heading: "tokens", numeric: true },
    { name: "staleness", heading: "staleness", numeric: true },
    { name: "attempts", heading: "attempts", numeric: true },
    { name: "why", heading: "why not in the batch", cell: (row) => visible(row.why) },
  ];
  return html`<${SortedTable} caption="rollouts" columns=${columns} rows=${rows} />`;
}

export function StepPage() {
  const [parameters, change] = useParameters();
  const { run = "", step = "" } = parameters;
  const { record: page, error } = useQuery("step", { run, step });
  const rows = useMemo(() => (page ? rowsOf(page.rollouts).map((row) => ({ ...row, key: row.rollout })) : []), [page]);
  const bins = useMemo(() => binsOf(rows.map((row) => row.reward).filter((reward) => reward != null)), [rows]);
  if (!page) return html`<main><${Waiting} error=${error} /></main>`;
  const chosen = parameters.bin ? Number(parameters.bin) : null;
  const bin = bins[chosen];
  const shown = bin ? rows.filter((row) => inBin(row.reward, bin)) : rows;
  const metrics = Object.entries(page.metrics).filter(([name]) => HEADLINE.test(name));
  return html`<main>
    <h1>Step ${page.step}</h1>
    <p class="tools">
      ${page.steps.map(
        (other) =>
          html`<a href=${address("step", { run, step: other })}
            >${other < page.step ? `‹ step ${other}` : `step ${other} ›`}</a
          >`,
      )}
    </p>
    <${Facts}
      facts=${[
        ["trained on", number(rows.filter((row) => row.in_batch).length)],
        ["rollouts", number(rows.length)],
        ["policy version", number(page.version)],
        ["reward", number(page.metrics.reward)],
        ...metrics.map(([name, value]) => [name, number(value)]),
      ]}
    />
    <section aria-label="rewards">
      <h2>Rewards</h2>
      <${Histogram} rows=${rows} bins=${bins} chosen=${chosen} onChoose=${(index) => change({ bin: index })} />
      <p class="legend">
        <span><i class="dot series-1"></i>trained on</span> <span><i class="dot others"></i>others</span>
        <span class="muted">choose a bar to see its rollouts below</span>
      </p>
    </section>
    <section aria-label="rollouts by their end">
      <h2>Trained on, dropped, failed</h2>
      <${Kinds} rows=${rows} />
    </section>
    <${Groups} run=${run} table=${page.groups} />
    <section aria-label="rollouts">
      <h2>Rollouts <${Downloads} path="step" parameters=${{ run, step }} csv /></h2>
      <p class="muted shown">${shown.length} of ${rows.length}${bin ? `, reward ${bin.title}` : ""}</p>
      <${Rollouts} run=${run} rows=${shown} />
    </section>
  </main>`;
}
