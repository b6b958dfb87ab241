// The parts that every page uses: requests, the address of a page, and small components.

import { listen } from "./live.js";
import { number } from "./text.js";
import { html, useEffect, useLayoutEffect, useMemo, useRef, useState } from "./vendor/preact-htm.js";

/** True in a page that was exported into a file: it has no links to other pages, and does not change. */
export const isSaved = document.getElementById("saved") !== null;

/** The address of a page or of a query, relative to the key. Parameters that are empty are left out. */
export function address(path, parameters = {}) {
  const given = Object.entries(parameters).filter(([, value]) => value !== "" && value != null && value !== false);
  const text = new URLSearchParams(given.map(([name, value]) => [name, String(value)])).toString();
  return text ? `${path}?${text}` : path;
}

/** Ask a query and return its record; an error of the server is thrown as its sentence. */
export async function ask(path, parameters, signal, read = (reply) => reply.json()) {
  let reply;
  try {
    reply = await fetch(address(`api/${path}`, parameters), { signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The viewer does not answer: it has ended, or the connection is lost.");
  }
  if (!reply.ok) throw new Error((await reply.json()).error);
  return read(reply);
}

/** A record, asked again after changes: while `live`, or while `live(record)`. What was known stays until the next
 * reply. Asking takes at most 5 % of the time. */
export function useQuery(path, parameters, live = false, read = undefined) {
  const [state, setState] = useState({ record: null, error: null });
  const isLive = !isSaved && (typeof live === "function" ? state.record == null || live(state.record) : live);
  const name = JSON.stringify([path, parameters]);
  const load = useRef(null);
  useEffect(() => {
    const control = new AbortController();
    let isBusy = false;
    let isWanted = false;
    load.current = async () => {
      isWanted = true;
      if (isBusy) return;
      [isBusy, isWanted] = [true, false];
      const began = performance.now();
      try {
        setState({ record: await ask(path, parameters, control.signal, read), error: null });
      } catch (error) {
        if (error.name === "AbortError") return;
        setState((before) => ({ ...before, error: error.message }));
      }
      setTimeout(
        () => {
          isBusy = false;
          if (isWanted) load.current();
        },
        Math.max(1000, 20 * (performance.now() - began)),
      );
    };
    load.current();
    return () => control.abort();
  }, [name]);
  useEffect(() => (isLive ? listen(() => load.current()) : undefined), [isLive]);
  return state;
}

/** The parameters of the page's address, and a function that changes some of them without a new page. */
export function useParameters() {
  const read = () => Object.fromEntries(new URLSearchParams(location.search));
  const [parameters, setParameters] = useState(read);
  useEffect(() => {
    const changed = () => setParameters(read());
    addEventListener("popstate", changed);
    return () => removeEventListener("popstate", changed);
  }, []);
  const change = (values) => {
    const page = location.pathname.split("/").pop();
    history.replaceState(null, "", address(page || "./", { ...read(), ...values }));
    setParameters(read());
  };
  return [parameters, change];
}

/** The rows of a table of columns. */
export function rowsOf(table) {
  const names = Object.keys(table);
  return (table[names[0]] ?? []).map((_, row) => Object.fromEntries(names.map((name) => [name, table[name][row]])));
}

/** A link to a page of a run by its number, which is the text unless another is given. more: other parameters. */
const linkTo =
  (page, parameter = page) =>
  (run, value, text = value, more = {}) => {
    if (value == null || isSaved) return value == null ? null : text;
    return html`<a href=${address(page, { run, [parameter]: value, ...more })}>${text}</a>`;
  };

/** A link to a step. Step 0, whose policy is scored before the first step, has no page. */
export const stepLink = (run, step, text = step) => (step === 0 ? text : linkTo("step")(run, step, text));
export const evaluationLink = linkTo("evaluation", "step");
export const groupLink = linkTo("group", "task");
export const rolloutLink = linkTo("rollout");
export const taskLink = linkTo("task");
export const replayLink = linkTo("replay");
export const searchLink = linkTo("search", "q");
export const compareLink = linkTo("compare", "a");

/** Call the function of a key that is pressed outside of a field. keys: functions by key. */
export function useKeys(keys) {
  const known = useRef(keys);
  known.current = keys;
  useLayoutEffect(() => {
    const pressed = (event) => {
      const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
      const act = !typing && !event.ctrlKey && !event.metaKey && !event.altKey && known.current[event.key];
      if (!act) return;
      event.preventDefault();
      act();
    };
    addEventListener("keydown", pressed);
    return () => removeEventListener("keydown", pressed);
  }, []);
}

/** Links to the page before and the page after, which the keys k and j open, with the same view. */
export function Neighbours({ page, parameter = page, before, after }) {
  const { run, view, signal } = Object.fromEntries(new URLSearchParams(location.search));
  const href = (number) => address(page, { run, [parameter]: number, view, signal });
  const go = (number) => number != null && !isSaved && location.assign(href(number));
  useKeys({ k: () => go(before), j: () => go(after) });
  const link = (number, text, key) =>
    number != null && !isSaved && html`<a href=${href(number)} title=${`key ${key}`}>${text}</a>`;
  return html`${link(before, `‹ ${page} ${before}`, "k")} ${link(after, `${page} ${after} ›`, "j")}`;
}

/** A choice of one of many. options: values with their texts. */
export function Select({ label, value, options, onChange }) {
  const option = ([value, text]) => html`<option value=${value}>${text}</option>`;
  return html`<label>${label} <select value=${value} onChange=${(event) => onChange(event.target.value)}>
    ${options.map(option)}
  </select></label>`;
}

export const Status = ({ status }) => html`<span class=${`pill status ${status}`}>${status}</span>`;

/** A text on one line, cut at its end; the pointer shows the rest. */
export const Words = ({ text, kind = "" }) => html`<span class=${`words ${kind}`} title=${text}>${text}</span>`;

/** An error, or a note that something is being loaded. */
export function Waiting({ error }) {
  if (error) return html`<p class="problem" role="alert">${error}</p>`;
  return html`<p class="muted" role="status">Loading …</p>`;
}

/** A part of a page with a heading. label: its name for a screen reader. */
export function Section({ title, label = title.toLowerCase(), beside, children }) {
  return html`<section aria-label=${label}>
    <h2>${title} ${beside}</h2>
    ${children}
  </section>`;
}

/** Facts as a list of names and values; those without a value are left out. */
export function Facts({ facts }) {
  const given = facts.filter(([, value]) => value != null && value !== "");
  return html`<dl class="facts">
    ${given.map(([name, value, title]) => html`<div title=${title}><dt>${name}</dt><dd>${value}</dd></div>`)}
  </dl>`;
}

/** The meaning of colours. entries: a colour, as CSS has it, and a text; perhaps a class with the colour. mark: dot,
 * dash or swatch. */
export function Legend({ entries, mark = "dot", before, after }) {
  const entry = ([background, text, name = ""]) =>
    html`<span><i class=${`${mark} ${name}`} style=${{ background }}></i>${text}</span>`;
  return html`<p class="legend">${before} ${entries.map(entry)} ${after}</p>`;
}

/** A button that is one of several choices. */
export function Choice({ chosen, onChoose, label, children }) {
  return html`<button aria-pressed=${chosen ? "true" : "false"} aria-label=${label} title=${label} onClick=${onChoose}>
    ${children}
  </button>`;
}

/** A field that filters. hasKey: the key `/` moves there. */
export function Search({ label, value, onChange, hasKey = false }) {
  const field = useRef(null);
  useKeys(hasKey ? { "/": () => field.current.focus() } : {});
  const leave = (event) => {
    if (event.key !== "Escape") return;
    onChange("");
    event.target.blur();
  };
  const input = (event) => onChange(event.target.value);
  return html`<input type="search" ref=${field} value=${value} aria-label=${label} placeholder=${label}
    onInput=${input} onKeyDown=${leave} />`;
}

/** Links to the same data for programs. */
export function Downloads({ path, parameters, csv = false }) {
  if (isSaved) return null;
  return html`<span class="downloads">
    <a href=${address(`api/${path}`, parameters)}>JSON</a>
    ${csv && html` <a href=${address(`api/${path}`, { ...parameters, as: "csv" })} download=${`${path}.csv`}>CSV</a>`}
  </span>`;
}

/** The last line of a page. */
export const ForPrograms = (query) =>
  !isSaved && html`<p class="tools muted"><span>for programs: this page</span> <${Downloads} ...${query} /></p>`;

const compare = (left, right) => {
  if (left == null || right == null) return (left == null) - (right == null);
  if (typeof left === "number" && typeof right === "number") return left - right;
  return String(left).localeCompare(String(right));
};

/** A table that is sorted by the heading that was chosen. columns: name, heading, cell(row), numeric and sortable.
 * keys: the columns that together differ in each row. */
export function SortedTable({ columns, rows, caption, start = "", sort, onSort, keys = [columns[0].name] }) {
  const [own, setOwn] = useState(start);
  const chosen = sort ?? own;
  const choose = onSort ?? setOwn;
  const down = chosen.startsWith("-");
  const by = down ? chosen.slice(1) : chosen;
  const sorted = useMemo(() => {
    if (!by) return rows;
    const ordered = [...rows].sort((left, right) => compare(left[by], right[by]));
    return down ? ordered.reverse() : ordered;
  }, [rows, by, down]);
  const heading = ({ name, heading = name, numeric, sortable = true }) => {
    const order = name !== by ? null : down ? "descending" : "ascending";
    const mark = { descending: " ▾", ascending: " ▴" }[order] ?? "";
    const sort = () => choose(order === "ascending" ? `-${name}` : name);
    const text = sortable ? html`<button class="plain" onClick=${sort}>${heading}${mark}</button>` : heading;
    return html`<th scope="col" class=${numeric ? "number" : ""} aria-sort=${order}>${text}</th>`;
  };
  const text = (row, { name, numeric, cell }) => (cell ? cell(row) : numeric ? number(row[name]) : row[name]);
  const line = (row) => html`<tr key=${keys.map((name) => row[name]).join()}>
    ${columns.map((column) => html`<td class=${column.numeric ? "number" : ""}>${text(row, column)}</td>`)}
  </tr>`;
  return html`<div class="scroll" tabindex="0" role="region" aria-label=${caption}>
    <table>
      <thead><tr>${columns.map(heading)}</tr></thead>
      <tbody>${sorted.map(line)}</tbody>
    </table>
  </div>`;
}
