// The page that the address names. All data come from `api/`, which any program may ask too.

import { address, html } from "./base.js";
import { GroupPage } from "./group.js";
import { RolloutPage } from "./rollout.js";
import { RunPage } from "./run.js";
import { RunsPage } from "./runs.js";
import { StepPage } from "./step.js";
import { render, useErrorBoundary } from "./vendor/preact-htm.js";

const PAGES = { "": RunsPage, run: RunPage, step: StepPage, group: GroupPage, rollout: RolloutPage };
const name = location.pathname.split("/").pop();
const run = new URLSearchParams(location.search).get("run");

function App() {
  const [failure] = useErrorBoundary((error) => console.error(error));
  const Page = PAGES[name];
  return html`<a class="skip" href="#content">to the content</a>
    <nav aria-label="pages">
      <a href="./" aria-current=${name === "" ? "page" : null}>Etude</a>
      ${
        run &&
        html`<span aria-hidden="true">›</span>
          <a href=${address("run", { run })} aria-current=${name === "run" ? "page" : null}>${run}</a>`
      }
    </nav>
    <div id="content">
      ${
        failure
          ? html`<main>
              <p class="problem" role="alert">This page has failed: ${String(failure.message ?? failure)}</p>
            </main>`
          : html`<${Page} />`
      }
    </div>`;
}

document.title = run ? `${run} – Etude` : "Runs – Etude";
document.getElementById("app").replaceChildren();
render(html`<${App} />`, document.getElementById("app"));
