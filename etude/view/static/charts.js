// Curves, stacked times and lanes, drawn by uPlot in the colours of the page.

import { Legend, Select } from "./base.js";
import { number, sum, tick } from "./text.js";
import { html, useEffect, useRef, useState } from "./vendor/preact-htm.js";

const HEIGHT = 150;
/** The events of a run: what happened, and the colour. */
export const MARKS = {
  checkpoint: ["checkpoint saved", "muted"],
  evaluation: ["evaluated", "faint"],
  resumed: ["resumed", "good"],
  stopped: ["stopped by the user", "series-4"],
  failed: ["ended by an error", "bad"],
  killed: ["killed", "bad"],
};

/** The name of the colour of one of several curves. */
export const seriesName = (index) => `series-${1 + (index % 8)}`;

const probe = document.body.appendChild(document.createElement("i"));

/** A colour of the style sheet as a canvas takes it: light or dark. */
function colour(name) {
  probe.style.color = `var(--${name})`;
  return getComputedStyle(probe).color;
}

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

/** A chart of uPlot over steps, as wide as its parent. data: uPlot's columns. scales, axisText, series and hooks: parts
 * of its options. onStep: called with the row under the pointer. shape: changes when the chart must be made anew. */
function Plot({ data, scales, axisText = tick, stepText, series, points, hooks = {}, onStep, ...rest }) {
  const { height = HEIGHT, label, shape, axis = "step" } = rest;
  const place = useRef(null);
  const chart = useRef(null);
  const theme = useTheme();
  useEffect(() => {
    const size = () => ({ width: Math.max(100, place.current.clientWidth), height });
    const options = {
      ...size(),
      legend: { show: false },
      cursor: { y: false, sync: { key: axis, scales: ["x", null] }, points, drag: { x: true, y: false } },
      scales,
      axes: axes(axisText, stepText),
      series: [{}, ...series()],
      hooks: { ...hooks, setCursor: [({ cursor }) => onStep(cursor.idx ?? null)] },
    };
    chart.current = new uPlot(options, data, place.current);
    const resized = new ResizeObserver(() => size().width !== chart.current.width && chart.current.setSize(size()));
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

function axes(format, formatStep = (step) => (Number.isInteger(step) ? String(step) : "")) {
  const grid = { stroke: colour("line"), width: 1 };
  const common = { stroke: colour("muted"), grid, font: "11px system-ui, sans-serif", ticks: { show: false } };
  const texts = (format) => (_, values) => values.map((value) => (value == null ? "" : format(value)));
  return [
    { ...common, size: 24, gap: 2, values: texts(formatStep) },
    { ...common, size: 48, gap: 4, values: texts(format) },
  ];
}

/** Smooth values as `etude plot` does: a mean of the neighbours, with larger weights for nearer ones. */
function smooth(values, percent) {
  const reach = Math.floor((values.length * percent) / 90);
  if (!reach) return values;
  return values.map((_, at) => {
    let total = 0;
    let weights = 0;
    for (let step = Math.max(0, at - reach); step <= Math.min(values.length - 1, at + reach); step++) {
      const weight = 1 + reach - Math.abs(step - at);
      total += weight * values[step];
      weights += weight;
    }
    return total / weights;
  });
}

/** Bring curves of several runs onto one axis. */
function align(curves, percent) {
  const steps = [...new Set(curves.flatMap((curve) => curve.steps))].sort((left, right) => left - right);
  const row = new Map(steps.map((step, index) => [step, index]));
  const columns = curves.flatMap((curve) => {
    const spread = (values) => {
      const column = new Array(steps.length).fill(undefined);
      for (const [index, step] of curve.steps.entries()) column[row.get(step)] = values[index];
      return column;
    };
    return [spread(curve.values), spread(smooth(curve.values, percent))];
  });
  return [steps, ...columns];
}

/** The first and the last step of several curves. */
export function stepRange(curves) {
  const ends = curves.flatMap((curve) => (curve?.steps.length ? [curve.steps[0], curve.steps.at(-1)] : []));
  return ends.length ? [Math.min(...ends), Math.max(...ends)] : [0, 1];
}

const UNITS = Object.entries({ h: 3600, min: 60, s: 1 });

/** Choices of how curves are drawn, as parameters of a page: smoothing, the scale of values, and the axis. */
export function CurveControls({ parameters: { smooth = 3, log, x = "step" }, change }) {
  const slide = (event) => change({ smooth: event.target.value });
  const axes = Object.entries({ step: "step", time: "training time", tokens: "tokens trained on" });
  return html`<label>smoothing <input type="range" min="0" max="20" value=${smooth} onInput=${slide} /></label>
    <label><input type="checkbox" checked=${Boolean(log)} onChange=${() => change({ log: !log })} /> logarithmic</label>
    <${Select} label="by" value=${x} options=${axes} onChange=${(axis) => change({ x: axis })} />`;
}

/** A function from a step to its place on another axis. axes: columns over some steps. */
function placing(axes, axis, size) {
  const [steps, places] = [axes.step, axes[axis]];
  return (step) => {
    const after = steps.findIndex((other) => other >= step);
    const end = after < 0 ? steps.length - 1 : after;
    const start = Math.max(0, end - 1);
    const share = end > start ? Math.min(1, (step - steps[start]) / (steps[end] - steps[start])) : 1;
    return (places[start] + share * (places[end] - places[start])) / size;
  };
}

/** The curves of runs as the parameters of a page have them. records: replies of the query `curves`. marks: those of
 * the first run. Returns the curves of each run by name, the marks and the view, as `CurvePanel` takes them. */
export function arrange(records, { smooth = 3, log, x = "step" }, marks = []) {
  const known = records.filter(({ axes }) => x === "step" || axes[x]);
  const longest = Math.max(0, ...known.map(({ axes }) => axes[x]?.at(-1) ?? 0));
  const [unit, size] = x === "time" ? (UNITS.find(([, size]) => longest >= 2 * size) ?? UNITS[2]) : [x, 1];
  const view = { smooth: Number(smooth), log: Boolean(log), axis: x, unit };
  if (x === "step") return { view, marks, curves: records.map(({ curves }) => curves) };
  const curvesOf = ({ axes, curves }) => {
    const place = axes[x] && placing(axes, x, size);
    const moved = ([name, { steps, values }]) => [name, { steps: steps.map(place), values }];
    return place ? Object.fromEntries(Object.entries(curves).map(moved)) : {};
  };
  const place = known.length ? placing(known[0].axes, x, size) : () => 0;
  return { view, marks: marks.map((mark) => ({ ...mark, step: place(mark.step) })), curves: records.map(curvesOf) };
}

/** The range of an axis of values. One value alone is in its middle. */
export function valueRange(_, low, high) {
  if (low == null) return [0, 1];
  const margin = Math.abs(low) / 10 || 1;
  return low < high ? uPlot.rangeNum(low, high, 0.1, true) : [low - margin, low + margin];
}

const PLAIN = { smooth: 3, log: false, axis: "step" };

/** One metric as a panel. curves: those of the runs, each with steps and values. marks: events by step. range: the
 * first and the last step of the axis. view: how it is drawn. */
export function CurvePanel({ metric, names, curves, range, marks = [], view = PLAIN }) {
  const known = curves.map((curve) => curve ?? { steps: [], values: [] });
  const data = align(known, view.smooth);
  const isLog = view.log && known.every(({ values }) => values.every((value) => value > 0));
  const placeText = (x) => (view.axis === "step" ? `step ${x}` : `${tick(x)} ${view.unit}`);
  const [at, setAt] = useState(null);
  const sparse = data[0].length <= 30;
  const now = useRef({});
  now.current = { marks, steps: data[0], range: range[0] < range[1] ? range : [range[0] - 1, range[1] + 1] };
  const extent = (_, low, high) => {
    const { steps, range } = now.current;
    const isZoomed = steps.length > 1 && (low !== steps[0] || high !== steps.at(-1));
    return isZoomed ? [low, high] : range;
  };
  const series = () =>
    names.flatMap((_, index) => {
      const stroke = colour(seriesName(index));
      const faint = { stroke, alpha: 0.3, width: 1, spanGaps: true, points: { show: false } };
      return [faint, { stroke, width: 2, spanGaps: true, points: { show: sparse, size: 4, fill: stroke } }];
    });
  const shownIn = (column) => (at == null ? column.findLast((value) => value != null) : column[at]);
  const values = names.map((name, index) => {
    const [value, smoothed] = [data[1 + 2 * index], data[2 + 2 * index]].map(shownIn);
    if (value == null) return null;
    const isOne = names.length === 1;
    const also = isOne && number(value) !== number(smoothed) && html`<small>smoothed ${number(smoothed)} </small>`;
    const color = isOne ? "" : `var(--${seriesName(index)})`;
    return html`<span title=${name} style=${{ color }}>${also}${number(value)}</span> `;
  });
  const ends = known.map((curve, index) => `${names[index]} ${number(curve.values.at(-1))}`);
  const scales = { x: { time: false, range: extent }, y: isLog ? { distr: 3 } : { range: valueRange } };
  return html`<figure class="panel">
    <figcaption>
      <span class="metric" title=${metric}>${metric}</span>
      <span class="value">${at != null && html`<small>${placeText(data[0][at])} </small>`}${values}</span>
    </figcaption>
    <${Plot} data=${data} scales=${scales} series=${series} points=${{ size: 6 }} axis=${view.axis}
      hooks=${{ drawAxes: [(chart) => drawMarks(chart, now.current.marks)] }} onStep=${setAt}
      stepText=${view.axis === "step" ? undefined : (x) => `${tick(x)} ${view.axis === "time" ? view.unit : ""}`}
      label=${`${metric}: ${ends.join(", ")}`} shape=${[names, sparse, isLog, view.axis, view.unit].join()} />
  </figure>`;
}

/** Draw the events of a run as vertical lines behind its curve. */
function drawMarks({ ctx, bbox, valToPos }, marks) {
  ctx.save();
  ctx.lineWidth = devicePixelRatio;
  const bottom = bbox.top + bbox.height;
  for (const { step, kind } of marks) {
    const x = valToPos(step, "x", true);
    if (!(x >= bbox.left && x <= bbox.left + bbox.width)) continue;
    ctx.strokeStyle = colour(MARKS[kind][1]);
    ctx.setLineDash(kind === "checkpoint" || kind === "evaluation" ? [2, 4] : []);
    ctx.beginPath();
    ctx.moveTo(x, kind === "checkpoint" ? bottom - 8 * devicePixelRatio : bbox.top);
    ctx.lineTo(x, bottom);
    ctx.stroke();
  }
  ctx.restore();
}

/** The phases of a step; each has the same colour everywhere. */
export const PHASES = ["collect", "annotate", "estimate", "update", "publish", "evaluate"];

/** The name of the colour of each of these phases. Those that are not named above take the colours that are left. */
export function phaseColours(phases) {
  const known = (phase) => (PHASES.includes(phase) ? seriesName(PHASES.indexOf(phase)) : null);
  const left = [6, 7, 0, 1, 2, 3, 4, 5].map(seriesName).filter((name) => !phases.map(known).includes(name));
  return Object.fromEntries(phases.map((phase) => [phase, known(phase) ?? left.shift() ?? "series-8"]));
}

/** The seconds of each step, stacked by phase. table: `step`, one column for each phase, and `total`. */
export function StackedTimes({ table }) {
  const phases = Object.keys(table).filter((name) => name !== "step" && name !== "total");
  const colours = phaseColours(phases);
  const [at, setAt] = useState(null);
  let below = new Array(table.step.length).fill(0);
  const sums = phases.map((phase) => (below = below.map((seconds, row) => seconds + (table[phase][row] ?? 0))));
  const series = () =>
    phases.toReversed().map((phase) => {
      const fill = colour(colours[phase]);
      return { stroke: fill, fill, width: 0, points: { show: false }, paths: uPlot.paths.stepped({ align: 1 }) };
    });
  const secondsOf = (name) => (at == null ? sum(table[name]) : table[name][at]);
  const entries = phases.map((phase) => {
    const [seconds, whole] = [secondsOf(phase), secondsOf("total")];
    const share = whole ? `${((100 * seconds) / whole).toFixed(1)} %` : "";
    return [`var(--${colours[phase]})`, html`${phase} ${number(seconds)} s <small>${share}</small>`];
  });
  const scales = { x: { time: false }, y: { range: (_, _low, high) => [0, high || 1] } };
  return html`<div>
    <${Plot} data=${[table.step, ...sums.toReversed()]} scales=${scales} axisText=${(value) => `${tick(value)} s`}
      series=${series} points=${{ show: false }} onStep=${setAt} height=${200} shape=${phases.join()}
      label="seconds of each step by phase" />
    <${Legend} before=${at == null ? "all steps:" : `step ${table.step[at]}:`} entries=${entries} />
  </div>`;
}
