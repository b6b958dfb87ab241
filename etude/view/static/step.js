// The page of one step: its rewards as a histogram, and its groups and rollouts, trained on or not.

import { Choice, Downloads, Facts, groupLink, Legend, rolloutLink, rowsOf, Section } from "./base.js";
import { Neighbours, searchLink, SortedTable, useParameters, useQuery, Waiting, Words } from "./base.js";
import { Replays } from "./replay.js";
import { mean, number, sum, visible } from "./text.js";
import { html, useMemo } from "./vendor/preact-htm.js";

const BINS = 20;
const HEADLINE = /^(loss|grad_norm|entropy|.*clip_share|.*kl|(mismatch|correction|staleness)\/.*)$/;
const TRAINED = "var(--series-1)";
const OTHERS = "var(--muted)";
const isNewest = ({ step, steps }) => steps.every((other) => other < step);
const LEGEND = Object.entries({ "trained on": TRAINED, others: OTHERS }).map(([text, colour]) => [colour, text]);

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

const inBin = (reward, { low, high, open }) =>
  reward != null && reward >= low && (open ? reward < high : reward <= high);

function Histogram({ rows, bins, chosen, onChoose }) {
  const counts = bins.map((bin) => rows.filter((row) => inBin(row.reward, bin)));
  const most = Math.max(1, ...counts.map((found) => found.length));
  const bar = (background, count) => html`<i style=${{ background, height: `${(100 * count) / most}%` }}></i>`;
  const column = (bin, index) => {
    const trained = counts[index].filter((row) => row.in_batch).length;
    const rest = counts[index].length - trained;
    const label = `reward ${bin.title}: ${trained} rollouts trained on, ${rest} others`;
    const choose = () => onChoose(index === chosen ? "" : String(index));
    return html`<${Choice} chosen=${index === chosen} label=${label} onChoose=${choose}>
      <span class="bars">${bar(OTHERS, rest)}${bar(TRAINED, trained)}</span>
      <small>${number(bin.low)}</small>
    <//>`;
  };
  return html`<div class="histogram" role="group" aria-label="rewards">${bins.map(column)}</div>`;
}

const most = (values) => values.reduce((found, value) => (found == null || value > found ? value : found), null);

/** The trained, the finished but dropped, and the other rollouts beside each other. */
function Kinds({ rows }) {
  const rest = (row) => (row.status === "succeeded" ? "dropped" : "failed or unfinished");
  const kindOf = (row) => (row.in_batch ? "trained on" : rest(row));
  const table = ["trained on", "dropped", "failed or unfinished"].map((kind) => {
    const found = rows.filter((row) => kindOf(row) === kind);
    const of = (name) => found.map((row) => row[name]).filter((value) => value != null);
    return {
      "rollouts that were": kind,
      rollouts: found.length,
      "mean reward": mean(of("reward")),
      "mean tokens": mean(of("tokens")),
      "most tokens": most(of("tokens")),
      truncated: found.length ? `${number((100 * sum(of("truncated").map(Number))) / found.length)} %` : "",
      "mean oldest version": mean(of("oldest_version")),
      "mean staleness": mean(of("staleness")),
      "most staleness": most(of("staleness")),
    };
  });
  const columns = Object.keys(table[0]).map((name, place) => ({ name, numeric: place > 0, sortable: false }));
  return html`<${SortedTable} caption="rollouts by their end" columns=${columns} rows=${table} />`;
}

function Groups({ run, rows }) {
  const level = rows.filter((row) => row.zero_variance);
  const total = (found, name) => sum(found.map((row) => row[name]));
  const share = (100 * total(level, "tokens")) / Math.max(1, total(rows, "tokens"));
  const prompt = (row) => html`<${Words} kind=${row.zero_variance ? "struck" : ""} text=${visible(row.prompt)} />`;
  const columns = [
    { name: "task", cell: (row) => groupLink(run, row.task) },
    { name: "prompt", cell: prompt },
    { name: "reward", heading: "mean reward", numeric: true },
    { name: "low", heading: "lowest", numeric: true },
    { name: "high", heading: "highest", numeric: true },
    { name: "rollouts", numeric: true },
    { name: "in_batch", heading: "trained on", numeric: true },
    { name: "failed", numeric: true },
    { name: "tokens", numeric: true },
    { name: "dropped", heading: "dropped for", cell: (row) => visible(row.dropped) },
  ];
  const cost = `${number(total(level, "rollouts"))} rollouts and ${number(total(level, "tokens"))} tokens`;
  const note = html`<p class="cost">
    ${level.length} of ${rows.length} groups have equal rewards and are struck through. They cost ${cost},
    ${" "}${number(share)} % of the step's sampled tokens.
  </p>`;
  return html`<${Section} title="Groups">
    ${level.length > 0 && note}
    <${SortedTable} caption="groups" columns=${columns} rows=${rows} />
  <//>`;
}

/** A table of rollouts, with those of these columns that it has. */
export function Rollouts({ run, rows }) {
  const names = Object.keys(rows[0] ?? {});
  const parts = names.filter((name) => name.startsWith("reward/"));
  const numeric = (name) => ({ name, heading: visible(name), numeric: true });
  const words = (name) => ({ name, cell: (row) => html`<${Words} text=${visible(row[name])} />` });
  const columns = [
    { name: "rollout", cell: (row) => rolloutLink(run, row.rollout) },
    { name: "task", cell: (row) => groupLink(run, row.task) },
    numeric("row"),
    { name: "source", cell: (row) => visible(row.source) },
    ...(rows.every((row) => row.status === "succeeded") ? [] : [{ name: "status" }]),
    ...["reward", "advantage", ...parts].map(numeric),
    ...["prompt", "answer"].map(words),
    ...["turns", "tokens", "staleness", "attempts"].map(numeric),
    { name: "why", heading: "why not in the batch", cell: (row) => visible(row.why) },
  ];
  const shown = columns.filter(({ name }) => names.includes(name));
  return html`<${SortedTable} caption="rollouts" columns=${shown} rows=${rows} keys=${["rollout"]} />`;
}

export function StepPage() {
  const [parameters, change] = useParameters();
  const { run = "", step = "" } = parameters;
  const { record: page, error } = useQuery("step", { run, step }, isNewest);
  const rows = useMemo(() => (page ? rowsOf(page.rollouts) : []), [page]);
  const groups = useMemo(() => (page ? rowsOf(page.groups) : []), [page]);
  const bins = useMemo(() => binsOf(rows.map((row) => row.reward).filter((reward) => reward != null)), [rows]);
  if (!page) return html`<main><${Waiting} error=${error} /></main>`;
  const chosen = parameters.bin ? Number(parameters.bin) : null;
  const bin = bins[chosen];
  const shown = bin ? rows.filter((row) => inBin(row.reward, bin)) : rows;
  const metrics = Object.entries(page.metrics).filter(([name]) => HEADLINE.test(name));
  const facts = [
    ["trained on", number(rows.filter((row) => row.in_batch).length)],
    ["rollouts", searchLink(run, `step=${step}`, number(rows.length)), "search in them"],
    ["policy version", number(page.version)],
    ["reward before the update", number(page.metrics.reward)],
    ...metrics.map(([name, value]) => [name, number(value)]),
  ];
  const [before, after] = [-1, 1].map((side) => page.steps.find((other) => (other - page.step) * side > 0));
  return html`<main>
    <h1>Step ${page.step}</h1>
    ${error && html`<${Waiting} error=${error} />`}
    <p class="tools"><${Neighbours} page="step" before=${before} after=${after} /></p>
    <${Facts} facts=${facts} />
    <${Section} title="Rewards">
      <${Histogram} rows=${rows} bins=${bins} chosen=${chosen} onChoose=${(index) => change({ bin: index })} />
      <${Legend} entries=${LEGEND} after=${html`<span class="muted">choose a bar to see its rollouts below</span>`} />
    <//>
    <${Section} title="Trained on, dropped, failed" label="rollouts by their end"><${Kinds} rows=${rows} /><//>
    <${Groups} run=${run} rows=${groups} />
    <${Section} title="Rollouts" beside=${html`<${Downloads} path="step" parameters=${{ run, step }} csv />`}>
      <p class="muted shown">${shown.length} of ${rows.length}${bin ? `, reward ${bin.title}` : ""}</p>
      <${Rollouts} run=${run} rows=${shown} />
    <//>
    <${Replays} run=${run} replays=${page.replays} />
  </main>`;
}
