// Curves, stacked times and lanes, drawn by uPlot in the colours of the page.

import { html, number, tick, useEffect, useRef, useState } from "./base.js";

const HEIGHT = 150;
export const MARKS = {
  checkpoint: "checkpoint saved",
  evaluation: "evaluated",
  resumed: "resumed",
  stopped: "stopped by the user",
  failed: "ended by an error",
  killed: "killed",
};

/** The value of a colour of the style sheet. */
export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

export const seriesColour = (index) => colour(`series-${1 + (index % 8)}`);

/** A number that changes when the colours of the system do, so that charts are drawn again. */
function useTheme() {
  const [theme, setTheme] = useState(0);
  useEffect(() => {
    const query = matchMedia("(prefers-color-scheme: dark)");
    const changed = () => setTheme((before) => before + 1);
    query.addEventListener("change", changed);
    return () => query.removeEventListener("change", changed);
  }, []);
  return theme;
}

/** A place for a chart of uPlot that has the width of its parent. `make` returns uPlot's options; data: its columns. */
function Plot({ make, data, height = HEIGHT, label, shape }) {
  const place = useRef(null);
  const chart = useRef(null);
  const theme = useTheme();
  useEffect(() => {
    const width = Math.max(100, place.current.clientWidth);
    chart.current = new uPlot({ width, height, ...make() }, data, place.current);
    const resized = new ResizeObserver(() => {
      const wide = Math.max(100, place.current.clientWidth);
      if (wide !== chart.current.width) chart.current.setSize({ width: wide, height });
    });
    resized.observe(place.current);
    return () => {
      resized.disconnect();
      chart.current.destroy();
      chart.current = null;
    };
  }, [shape, theme, height]);
  useEffect(() => chart.current?.setData(data), [data]);
  return html`<div class="plot" ref=${place} role="img" aria-label=${label}></div>`;
}

function axes(format = tick) {
  const stroke = colour("muted");
  const grid = { stroke: colour("line"), width: 1 };
  const font = "11px system-ui, sans-serif";
  const common = { stroke, grid, font, ticks: { show: false } };
  const whole = (_, values) => values.map((value) => (Number.isInteger(value) ? String(value) : ""));
  return [
    { ...common, size: 24, gap: 2, values: whole },
    { ...common, size: 48, gap: 4, values: (_, values) => values.map(format) },
  ];
}

/** Smooth values as `etude plot` does: a mean of the neighbours, with larger weights for nearer ones. */
export function smooth(values) {
  const reach = Math.floor(values.length / 30);
  if (!reach) return values;
  return values.map((_, at) => {
    let sum = 0;
    let weights = 0;
    for (let step = Math.max(0, at - reach); step <= Math.min(values.length - 1, at + reach); step++) {
      const weight = 1 + reach - Math.abs(step - at);
      sum += weight * values[step];
      weights += weight;
    }
    return sum / weights;
  });
}

/** Bring curves of several runs onto one axis of steps. */
function align(curves) {
  const steps = [...new Set(curves.flatMap((curve) => curve.steps))].sort((left, right) => left - right);
  const row = new Map(steps.map((step, index) => [step, index]));
  const columns = curves.flatMap((curve) => {
    const spread = (values) => {
      const column = new Array(steps.length).fill(undefined);
      curve.steps.forEach((step, index) => (column[row.get(step)] = values[index]));
      return column;
    };
    return [spread(curve.values), spread(smooth(curve.values))];
  });
  return [steps, ...columns];
}

/** The first and the last step of several curves. */
export function stepRange(curves) {
  const ends = curves.flatMap((curve) => (curve?.steps.length ? [curve.steps[0], curve.steps.at(-1)] : []));
  return ends.length ? [Math.min(...ends), Math.max(...ends)] : [0, 1];
}

/** One metric as a panel. curves: those of the runs, each with steps and values. marks: events by step. range: the
 * first and the last step of the axis. */
export function CurvePanel({ metric, names, curves, range, marks = [] }) {
  const known = curves.map((curve) => curve ?? { steps: [], values: [] });
  const data = align(known);
  const [at, setAt] = useState(null);
  const last = known.length === 1 ? smooth(known[0].values).at(-1) : null;
  const sparse = data[0].length <= 30;
  const marksNow = useRef(marks);
  const rangeNow = useRef(range);
  marksNow.current = marks;
  rangeNow.current = range[0] < range[1] ? range : [range[0] - 1, range[1] + 1];
  const stepsNow = useRef(data[0]);
  stepsNow.current = data[0];
  const isZoomed = (low, high) => {
    const steps = stepsNow.current;
    return steps.length > 1 && (low !== steps[0] || high !== steps.at(-1));
  };
  const make = () => ({
    legend: { show: false },
    cursor: { y: false, sync: { key: "steps", scales: ["x", null] }, points: { size: 6 }, drag: { x: true, y: false } },
    scales: { x: { time: false, range: (_, low, high) => (isZoomed(low, high) ? [low, high] : rangeNow.current) } },
    axes: axes(),
    series: [
      {},
      ...names.flatMap((_, index) => {
        const stroke = seriesColour(index);
        const faint = { stroke: `${stroke}50`, width: 1, spanGaps: true, points: { show: false } };
        return [faint, { stroke, width: 2, spanGaps: true, points: { show: sparse, size: 4, fill: stroke } }];
      }),
    ],
    hooks: {
      setCursor: [(chart) => setAt(chart.cursor.idx ?? null)],
      drawAxes: [(chart) => drawMarks(chart, marksNow.current)],
    },
  });
  const values = at == null ? [last] : names.map((_, index) => data[1 + 2 * index]?.[at]);
  const shown = values
    .filter((value) => value != null)
    .map(number)
    .join(" · ");
  const ends = known.map((curve, index) => `${names[index]} ${number(curve.values.at(-1))}`);
  const label = `${metric}: ${ends.join(", ")}`;
  return html`<figure class="panel">
    <figcaption>
      <span class="metric" title=${metric}>${metric}</span>
      <span class="value">${at != null && html`<small>step ${data[0][at]} </small>`}${shown}</span>
    </figcaption>
    <${Plot} make=${make} data=${data} label=${label} shape=${`${names.join()} ${sparse}`} />
  </figure>`;
}

/** Draw the events of a run as vertical lines behind its curve. */
function drawMarks(chart, marks) {
  const { ctx, bbox } = chart;
  ctx.save();
  for (const mark of marks) {
    const x = chart.valToPos(mark.step, "x", true);
    if (!(x >= bbox.left && x <= bbox.left + bbox.width)) continue;
    ctx.strokeStyle = colour(`mark-${mark.kind}`);
    ctx.lineWidth = devicePixelRatio;
    ctx.setLineDash(mark.kind === "checkpoint" || mark.kind === "evaluation" ? [2, 4] : []);
    ctx.beginPath();
    ctx.moveTo(x, mark.kind === "checkpoint" ? bbox.top + bbox.height - 8 * devicePixelRatio : bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
  }
  ctx.restore();
}

/** The phases of a step; each has the same colour everywhere. */
export const PHASES = ["collect", "annotate", "estimate", "update", "publish", "evaluate"];

/** The number of the colour of each of these phases. Those that are not named above take the colours that are left. */
export function phaseSeries(phases) {
  const known = (phase) => (PHASES.includes(phase) ? 1 + PHASES.indexOf(phase) : null);
  const left = [7, 8, 1, 2, 3, 4, 5, 6].filter((series) => !phases.some((phase) => known(phase) === series));
  return Object.fromEntries(phases.map((phase) => [phase, known(phase) ?? left.shift() ?? 8]));
}

/** The seconds of each step, stacked by phase. table: `step`, one column for each phase, and `total`. */
export function StackedTimes({ table }) {
  const phases = Object.keys(table).filter((name) => name !== "step" && name !== "total");
  const series = phaseSeries(phases);
  const [at, setAt] = useState(null);
  const sums = phases.map(() => new Array(table.step.length).fill(0));
  phases.forEach((phase, index) =>
    table[phase].forEach((seconds, row) => (sums[index][row] = (index ? sums[index - 1][row] : 0) + (seconds ?? 0))),
  );
  const data = [table.step, ...sums.toReversed()];
  const make = () => ({
    legend: { show: false },
    cursor: { y: false, sync: { key: "steps", scales: ["x", null] }, points: { show: false } },
    scales: { x: { time: false }, y: { range: (_, low, high) => [0, high || 1] } },
    axes: axes((value) => `${tick(value)} s`),
    series: [
      {},
      ...phases.toReversed().map((_, index) => {
        const place = phases.length - 1 - index;
        const fill = seriesColour(series[phases[place]] - 1);
        return { stroke: fill, fill, width: 0, points: { show: false }, paths: uPlot.paths.stepped({ align: 1 }) };
      }),
    ],
    hooks: { setCursor: [(chart) => setAt(chart.cursor.idx ?? null)] },
  });
  const total = table.total.reduce((sum, value) => sum + (value ?? 0), 0);
  const share = (phase) => {
    const seconds = at == null ? table[phase].reduce((sum, value) => sum + (value ?? 0), 0) : table[phase][at];
    const whole = at == null ? total : table.total[at];
    return { seconds, percent: whole ? `${((100 * seconds) / whole).toFixed(1)} %` : "" };
  };
  return html`<div>
    <${Plot} make=${make} data=${data} height=${200} shape=${phases.join()} label="seconds of each step by phase" />
    <p class="legend">
      <span>${at == null ? "all steps" : `step ${table.step[at]}`}:</span>
      ${phases.map((phase) => {
        const { seconds, percent } = share(phase);
        return html`<span
          ><i class=${`dot series-${series[phase]}`}></i>${phase} ${number(seconds)} s <small>${percent}</small></span
        >`;
      })}
    </p>
  </div>`;
}
