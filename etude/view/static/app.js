// The page that the address names. All data come from `api/`, which any program may ask too.

import { address, Search } from "./base.js";
import { ComparePage } from "./compare.js";
import { EvaluationPage } from "./evaluation.js";
import { GroupPage } from "./group.js";
import { ReplayPage } from "./replay.js";
import { RolloutPage } from "./rollout.js";
import { RunPage } from "./run.js";
import { RunsPage } from "./runs.js";
import { SearchPage } from "./search.js";
import { StepPage } from "./step.js";
import { StorePage } from "./store.js";
import { TaskPage } from "./task.js";
import { html, render, useErrorBoundary, useState } from "./vendor/preact-htm.js";

const OF_STEP = { step: StepPage, group: GroupPage, rollout: RolloutPage, task: TaskPage, replay: ReplayPage };
const OF_RUN = { run: RunPage, evaluation: EvaluationPage, store: StorePage, search: SearchPage, ...OF_STEP };
const PAGES = { "": RunsPage, compare: ComparePage, ...OF_RUN };
const name = location.pathname.split("/").pop();
const run = new URLSearchParams(location.search).get("run");

const HAVE_SEARCH = ["", "run", "search"];

/** A field that searches the rollouts of the run, on pages without a search of their own. */
function RunSearch() {
  const [words, setWords] = useState("");
  const search = (event) => {
    event.preventDefault();
    location.assign(address("search", { run, q: words }));
  };
  return html`<form role="search" onSubmit=${search}>
    <${Search} hasKey label="search the rollouts" value=${words} onChange=${setWords} />
  </form>`;
}

function App() {
  const [failure] = useErrorBoundary((error) => console.error(error));
  const link = (page, href, text) => html`<a href=${href} aria-current=${name === page ? "page" : null}>${text}</a>`;
  const alert = (text) => html`<main><p class="problem" role="alert">This page has failed: ${text}</p></main>`;
  return html`<a class="skip" href="#content">to the content</a>
    <nav aria-label="pages">
      ${link("", "./", "Etude")}
      ${run && [html`<span aria-hidden="true">›</span>`, link("run", address("run", { run }), run)]}
      ${run && link("search", address("search", { run }), "search")}
      ${run && !HAVE_SEARCH.includes(name) && html`<${RunSearch} />`}
    </nav>
    <div id="content">${failure ? alert(String(failure.message ?? failure)) : html`<${PAGES[name]} />`}</div>`;
}

document.title = run ? `${run} – Etude` : "Runs – Etude";
document.getElementById("app").replaceChildren();
render(html`<${App} />`, document.getElementById("app"));
