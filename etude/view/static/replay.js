// The page of one replay: a step under the run's options and under others; and the list of a step's replays.

import { ForPrograms, replayLink, rolloutLink, rowsOf, Section, SortedTable } from "./base.js";
import { stepLink, useParameters, useQuery, Waiting } from "./base.js";
import { optionText, visible } from "./text.js";
import { html } from "./vendor/preact-htm.js";

const SIDES = { recorded: "the run's options", changed: "other options" };

/** The replays of a step, or the command that makes one. */
export function Replays({ run, replays }) {
  if (!replays) return null;
  const { command, names, options } = replays;
  const link = (name, place) => html`<li>${replayLink(run, name)} ${options[place] || "with the run's options"}</li>`;
  const none = html`<p class="muted">
    There is none. This command computes the advantage of each token, its part in the loss, its ratio, entropy and KL:
    ${" "}<code>${command}</code>
  </p>`;
  return html`<${Section} title="Replays">${names.length ? html`<ul>${names.map(link)}</ul>` : none}<//>`;
}

export function ReplayPage() {
  const [{ run = "", replay = "" }] = useParameters();
  const { record: page, error } = useQuery("replay", { run, replay });
  if (!page) return html`<main><${Waiting} error=${error} /></main>`;
  const sides = Object.keys(SIDES).filter((side) => side in page.numbers);
  const last = sides.at(-1);
  const compared = sides.map((name) => ({ name, heading: SIDES[name], numeric: true, sortable: false }));
  const given = sides.map((name) => ({ name, heading: SIDES[name], cell: (row) => optionText(row[name]) }));
  const options = [{ name: "option", cell: ({ option }) => html`<code>${option}</code>` }, ...given];
  const tokens = (row, text) =>
    rolloutLink(run, row.rollout, text, { view: "tokens", turn: row.turn, replay, side: last, signal: "weight" });
  const movers = [
    { name: "text", cell: (row) => tokens(row, JSON.stringify(visible(row.text))) },
    { name: "rollout", cell: (row) => rolloutLink(run, row.rollout) },
    { name: "turn", numeric: true },
    { name: "index", heading: "token", numeric: true },
    ...compared,
  ];
  const numbers = Object.keys(page.rollouts).filter((name) => name !== "rollout");
  const heading = (name) => name.replace("_recorded", "").replace("_changed", ", other options");
  const rollouts = [
    { name: "rollout", cell: (row) => tokens(row, row.rollout) },
    ...numbers.map((name) => ({ name, heading: heading(name), numeric: true })),
  ];
  const table = (title, columns, data, keys) => html`<${Section} title=${title}>
    <${SortedTable} caption=${title} columns=${columns} rows=${rowsOf(data)} keys=${keys} />
  <//>`;
  return html`<main>
    <h1>Replay of step ${stepLink(run, page.step)}</h1>
    <p>${page.headline}</p>
    ${page.conclusions.map((sentence) => html`<p>${sentence}</p>`)}
    ${page.options.option.length > 0 && table("Options that differ", options, page.options)}
    ${table("Numbers", [{ name: "name", sortable: false }, ...compared], page.numbers)}
    ${
      page.movers.text.length > 0 &&
      table("Tokens whose weights differ most", movers, page.movers, ["rollout", "turn", "index"])
    }
    ${table("Rollouts", rollouts, page.rollouts)}
    <${ForPrograms} path="replay" parameters=${{ run, replay }} csv />
  </main>`;
}
