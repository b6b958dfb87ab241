// The lanes of some steps: what the trainer did, and how many attempts ran meanwhile.

import { Legend, rowsOf, Section, useQuery, Waiting } from "./base.js";
import { PHASES, phaseColours } from "./charts.js";
import { number } from "./text.js";
import { html } from "./vendor/preact-htm.js";

const TITLE = "Trainer and engines over time";
const HEIGHT = 96;
const COLOURS = phaseColours(PHASES);
const fill = (phase) => `var(--${COLOURS[phase]})`;

function Bars({ trainer, seconds }) {
  return rowsOf(trainer).map(({ step, phase, begin, end }) => {
    const [left, width] = [begin, Math.max(end - begin, seconds / 1000)].map((time) => `${(100 * time) / seconds}%`);
    return html`<rect x=${left} width=${width} y="4" height="24" style=${{ fill: fill(phase) }}>
      <title>step ${step}: ${phase}, ${number(end - begin)} s</title>
    </rect>`;
  });
}

/** The running attempts as an area below the bars. */
function Attempts({ running }) {
  const most = Math.max(1, ...running);
  const low = HEIGHT - 2;
  const points = running.map((value, index) => `${index},${low - (58 * value) / most}`).join(" ");
  const box = `0 0 ${running.length} ${HEIGHT}`;
  return html`<svg width="100%" height=${HEIGHT} viewBox=${box} preserveAspectRatio="none">
    <polygon class="attempts" points=${`0,${low} ${points} ${running.length},${low}`} />
  </svg>`;
}

export function LanesView({ run, live, step, parameters, change }) {
  const last = parameters.step ? Number(parameters.step) : null;
  const { record, error } = useQuery("lanes", { run, last }, live && last == null);
  if (error) return html`<${Section} title=${TITLE}><p class="muted">${error}</p><//>`;
  if (!record) return html`<${Section} title=${TITLE}><${Waiting} /><//>`;
  const { trainer, seconds } = record;
  const { running } = record.attempts;
  const steps = [...new Set(trainer.step)];
  const move = (by) => change({ step: Math.max(1, Math.min(step ?? 1, (last ?? step ?? 1) + by)) });
  const most = Math.max(0, ...running);
  const from = `steps ${steps[0]} to ${steps.at(-1)}`;
  const idle = record.idle == null ? "" : `; no attempt ran in ${(100 * record.idle).toFixed(0)} % of the time`;
  const entries = PHASES.filter((phase) => trainer.phase.includes(phase)).map((phase) => [fill(phase), phase]);
  if (most > 0) entries.push(["var(--attempts)", `running attempts, at most ${number(Math.round(most))}`]);
  const label = `phases of the trainer in ${from}, above the running attempts`;
  return html`<${Section} title=${TITLE} label="lanes">
    <p class="tools">
      <button onClick=${() => move(-3)} disabled=${steps[0] <= 1}>earlier</button>
      <button onClick=${() => move(3)} disabled=${last == null || last >= step}>later</button>
      <button onClick=${() => change({ step: "" })} disabled=${last == null}>newest</button>
      <span class="muted">${from}, ${number(seconds)} s${idle}</span>
    </p>
    <svg class="lanes" width="100%" height=${HEIGHT} role="img" aria-label=${label}>
      ${running.length > 0 && html`<${Attempts} running=${running} />`}
      <${Bars} trainer=${trainer} seconds=${seconds} />
    </svg>
    <${Legend} entries=${entries} />
  <//>`;
}
