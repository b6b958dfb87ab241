// The page of one task over the run: its rewards, and the answers at two of the steps that drew it.

import { Facts, ForPrograms, Legend, rowsOf, Section, Select, useParameters, useQuery, Waiting } from "./base.js";
import { CurvePanel, seriesName, stepRange } from "./charts.js";
import { Answers, ROW_OF, useOf } from "./group.js";
import { Conversation } from "./rollout.js";
import { number, visible } from "./text.js";
import { html, useEffect, useState } from "./vendor/preact-htm.js";

const NAMES = ["mean", "highest", "lowest"];
const TOKENS = ["mean_tokens", "most_tokens", "fewest_tokens"];

export function TaskPage() {
  const [{ run = "", task = "", a = "", b = "" }, change] = useParameters();
  const [part, setPart] = useState(0);
  const { record: page, error } = useQuery("task", { run, task, a, b, part: part || "" });
  useEffect(() => {
    if (page && !page.complete) setPart(part + 1);
  }, [page]);
  if (!page) return html`<main><${Waiting} error=${error} /></main>`;
  const { first, second, row, source, count, complete, common, draws } = page;
  const rows = rowsOf(draws);
  const settled = rows.filter(({ step }) => step != null);
  const curveOf = (name) => {
    const known = settled.filter((draw) => draw[name] != null);
    return { steps: known.map(({ step }) => step), values: known.map((draw) => draw[name]) };
  };
  const panel = (metric, columns) => {
    const curves = columns.map(curveOf);
    return html`<${CurvePanel} metric=${metric} names=${NAMES} curves=${curves} range=${stepRange(curves)} />`;
  };
  const at = ({ step, task }) => (step == null ? `task ${task}, in no step yet` : `step ${step}, task ${task}`);
  const option = (draw) => [draw.task, `${at(draw)}: ${draw.reward == null ? "no reward" : number(draw.reward)}`];
  const choose = (side, chosen) => html`<${Select} label=${side} value=${chosen.task}
    options=${rows.map(option)} onChange=${(task) => change({ [side]: task })} />`;
  const groups = first.task === second.task ? [first] : [first, second];
  const titles = groups.map((group) => `Answers at ${at(group)}`);
  const choices = html`<p class="tools views">${choose("a", first)} ${choose("b", second)}</p>`;
  const facts = [
    [ROW_OF[useOf(first)], row],
    ["source", visible(source)],
    ["draws", `${number(count)}${complete ? "" : " so far; more are being read"}`],
    ["shown", rows.length < count ? number(rows.length) : ""],
  ];
  return html`<main>
    <h1>Task of row ${row} over the run</h1>
    ${error && html`<${Waiting} error=${error} />`}
    <${Facts} facts=${facts} />
    <${Conversation} messages=${first.prompt} images=${first.images} pictures=${first.pictures} />
    <${Section} title="Rewards over the run">
      <div class="panels">
        ${panel("reward", ["reward", "high", "low"])} ${panel("sampled tokens of an answer", TOKENS)}
      </div>
      <${Legend} entries=${NAMES.map((name, place) => [`var(--${seriesName(place)})`, name])} />
    <//>
    ${count > 1 && choices}
    ${count === 1 && complete && html`<p class="muted">The run drew this task once.</p>`}
    <${Answers} run=${run} groups=${groups} tokens=${common} titles=${titles} />
    <${ForPrograms} path="task" parameters=${{ run, task, a, b }} csv />
  </main>`;
}
