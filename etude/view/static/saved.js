// A page in one file. What it would ask a server is in the document.

import { RolloutPage } from "./rollout.js";
import { StepPage } from "./step.js";
import { html, render } from "./vendor/preact-htm.js";

const { page, parameters, replies } = JSON.parse(document.getElementById("saved").textContent);

globalThis.fetch = async (address) => {
  const [path, query] = address.split("?");
  const sorted = [...new URLSearchParams(query)].map((parameter) => parameter.join("=")).sort();
  const found = replies[[path, ...sorted].join(" ")];
  if (!found) return new Response('{"error": "This is not in the file."}', { status: 404 });
  const bytes = Uint8Array.from(atob(found), (letter) => letter.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip")));
};

const given = Object.fromEntries(new URLSearchParams(location.search));
history.replaceState(null, "", `?${new URLSearchParams({ ...given, ...parameters })}`);
const app = document.getElementById("app");
app.replaceChildren();
const Page = { step: StepPage, rollout: RolloutPage }[page];
render(html`<nav>Etude <span aria-hidden="true">›</span> ${parameters.run}</nav><${Page} />`, app);
