// The lanes of some steps: what the trainer did, and how many attempts ran meanwhile.

import { Waiting, html, number, rowsOf, useQuery } from "./base.js";
import { PHASES, phaseSeries } from "./charts.js";

const HEIGHT = 96;

const SERIES = phaseSeries(PHASES);
const seriesClass = (phase) => `series-${SERIES[phase]}`;

function Bars({ trainer, seconds }) {
  return rowsOf(trainer).map((span) => {
    const width = (100 * (span.end - span.begin)) / seconds;
    return html`<rect
      x=${`${(100 * span.begin) / seconds}%`}
      width=${`${Math.max(width, 0.1)}%`}
      y="4"
      height="24"
      class=${seriesClass(span.phase)}
      ><title>step ${span.step}: ${span.phase}, ${number(span.end - span.begin)} s</title></rect
    >`;
  });
}

/** The running attempts as an area below the bars. */
function Attempts({ attempts }) {
  const most = Math.max(1, ...attempts.running);
  const count = attempts.running.length;
  const points = attempts.running.map((value, index) => `${index},${HEIGHT - 2 - (58 * value) / most}`);
  return html`<svg
    x="0"
    y="0"
    width="100%"
    height=${HEIGHT}
    viewBox=${`0 0 ${count} ${HEIGHT}`}
    preserveAspectRatio="none"
  >
    <polygon class="attempts" points=${`0,${HEIGHT - 2} ${points.join(" ")} ${count},${HEIGHT - 2}`} />
  </svg>`;
}

export function LanesView({ run, live, step, parameters, change }) {
  const last = parameters.step ? Number(parameters.step) : null;
  const { record, error } = useQuery("lanes", { run, last }, live && last == null ? 5 : 0);
  if (error)
    return html`<section>
      <h2>Lanes</h2>
      <p class="muted">${error}</p>
    </section>`;
  if (!record)
    return html`<section>
      <h2>Lanes</h2>
      <${Waiting} />
    </section>`;
  const steps = [...new Set(record.trainer.step)];
  const used = PHASES.filter((phase) => record.trainer.phase.includes(phase));
  const move = (by) => change({ step: Math.max(1, Math.min(step ?? 1, (last ?? step ?? 1) + by)) });
  const most = Math.max(0, ...record.attempts.running);
  const covered = `steps ${steps[0]} to ${steps.at(-1)}, ${number(record.seconds)} s`;
  const idle = record.idle == null ? "" : `; no attempt ran in ${(100 * record.idle).toFixed(0)} % of the time`;
  return html`<section aria-label="lanes">
    <h2>Trainer and engines over time</h2>
    <p class="tools">
      <button onClick=${() => move(-3)} disabled=${steps[0] <= 1}>earlier</button>
      <button onClick=${() => move(3)} disabled=${last == null || last >= step}>later</button>
      <button onClick=${() => change({ step: "" })} disabled=${last == null}>newest</button>
      <span class="muted">${covered}${idle}</span>
    </p>
    <svg
      class="lanes"
      width="100%"
      height=${HEIGHT}
      role="img"
      aria-label=${`phases of the trainer in steps ${steps[0]} to ${steps.at(-1)}, above the running attempts`}
    >
      ${record.attempts.running.length > 0 && html`<${Attempts} attempts=${record.attempts} />`}
      <${Bars} trainer=${record.trainer} seconds=${record.seconds} />
    </svg>
    <p class="legend">
      ${used.map((phase) => html`<span><i class=${`dot ${seriesClass(phase)}`}></i>${phase}</span>`)}
      ${
        most > 0 && html`<span><i class="dot attempts"></i>running attempts, at most ${number(Math.round(most))}</span>`
      }
    </p>
  </section>`;
}
