// The page of one evaluation: the scores of a step by data source, and the answers that were scored.

import { Downloads, evaluationLink, Neighbours, rowsOf, Section, Select, SortedTable, searchLink } from "./base.js";
import { useParameters, useQuery, Waiting } from "./base.js";
import { Rollouts } from "./step.js";
import { number, visible } from "./text.js";
import { html } from "./vendor/preact-htm.js";

const isOpen = ({ scores }) => !scores.source.length;

export function EvaluationPage() {
  const [{ run = "", step = "", source = "", from = "" }, change] = useParameters();
  const query = { run, step, source, from };
  const { record: page, error } = useQuery("evaluation", query, isOpen);
  if (!page) return html`<main><${Waiting} error=${error} /></main>`;
  const { first, count, scores } = page;
  const end = first + page.answers.rollout.length;
  const [before, after] = [-1, 1].map((side) => page.steps.find((other) => (other - page.step) * side > 0));
  const columns = Object.keys(scores).map((name, place) => ({ name, heading: visible(name), numeric: place > 0 }));
  const names = [["", "all"], ...page.sources.map((name) => [name, visible(name)])];
  const choose = (source) => change({ source, from: "" });
  return html`<main>
    <h1>Evaluation after step ${page.step}</h1>
    ${error && html`<${Waiting} error=${error} />`}
    <p class="tools"><${Neighbours} page="evaluation" parameter="step" before=${before} after=${after} /></p>
    <${Section} title="Scores">
      ${isOpen(page) && html`<p class="muted">The answers of this step are not all scored yet.</p>`}
      <${SortedTable} caption="scores" columns=${columns} rows=${rowsOf(scores)} />
    <//>
    <${Section} title="Answers" beside=${html`<${Downloads} path="evaluation" parameters=${query} csv />`}>
      <p class="tools">
        <span class="muted shown">${number(first + 1)} to ${number(end)} of ${number(count)}</span>
        ${names.length > 2 && html`<${Select} label="source" value=${source} options=${names} onChange=${choose} />`}
        ${first > 0 && evaluationLink(run, page.step, "first answers", { source })}
        ${end < count && evaluationLink(run, page.step, "more answers", { source, from: end })}
        ${searchLink(run, "use:evaluation", "search in all evaluations")}
      </p>
      <${Rollouts} run=${run} rows=${rowsOf(page.answers)} />
    <//>
  </main>`;
}
