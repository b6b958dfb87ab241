// The parts that every page uses: requests, the address of a page, numbers as text, and small components.

import { html, useEffect, useMemo, useRef, useState } from "./vendor/preact-htm.js";

export { html, useEffect, useMemo, useRef, useState };

/** The address of a page or of a query, relative to the key. Parameters that are empty are left out. */
export function address(path, parameters = {}) {
  const given = Object.entries(parameters).filter(([, value]) => value !== "" && value != null && value !== false);
  const text = new URLSearchParams(given.map(([name, value]) => [name, String(value)])).toString();
  return text ? `${path}?${text}` : path;
}

/** Ask a query and return its record; an error of the server is thrown as its sentence. */
export async function ask(path, parameters, signal) {
  let reply;
  try {
    reply = await fetch(address(`api/${path}`, parameters), { signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The viewer does not answer: it has ended, or the connection is lost.");
  }
  const record = await reply.json();
  if (!reply.ok) throw new Error(record.error);
  return record;
}

/** A record, asked again every `every` seconds while that is above 0. What was known stays until the next reply. */
export function useQuery(path, parameters, every = 0) {
  const [state, setState] = useState({ record: null, error: null });
  const name = JSON.stringify([path, parameters]);
  useEffect(() => {
    const control = new AbortController();
    let timer = 0;
    const load = async () => {
      try {
        setState({ name, record: await ask(path, parameters, control.signal), error: null });
      } catch (error) {
        if (error.name === "AbortError") return;
        setState((before) => ({ ...before, name, error: error.message }));
      }
      if (every) timer = setTimeout(load, 1000 * every);
    };
    load();
    return () => {
      control.abort();
      clearTimeout(timer);
    };
  }, [name, every]);
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

/** A number with about four digits; an empty text for no number. */
export function number(value) {
  if (value == null) return "";
  if (typeof value !== "number") return String(value);
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e7) return value.toLocaleString("en");
  if (size >= 1e5 || (size > 0 && size < 1e-3)) return value.toExponential(1).replace("e+", "e");
  return value.toFixed(size >= 1000 ? 0 : size >= 100 ? 1 : size >= 10 ? 2 : size >= 1 ? 3 : 4);
}

/** A number at an axis, as short as it can be. */
export function tick(value) {
  const size = Math.abs(value);
  if (size >= 1e4 || (size > 0 && size < 1e-3)) return value.toExponential(1).replace("e+", "e").replace(".0e", "e");
  return String(Number(value.toPrecision(4)));
}

/** A duration in seconds as text. */
export function duration(seconds) {
  if (seconds == null) return "";
  if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min`;
  if (minutes < 48 * 60) return `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} min`;
  return `${Math.floor(minutes / 1440)} days`;
}

/** The time since a moment, in seconds since 1970. */
export function ago(seconds) {
  return seconds ? `${duration(Math.max(0, Date.now() / 1000 - seconds))} ago` : "";
}

/** A moment as local date and time. */
export function moment(seconds) {
  if (!seconds) return "";
  const at = new Date(1000 * seconds);
  const two = (value) => String(value).padStart(2, "0");
  const date = `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())}`;
  return `${date} ${two(at.getHours())}:${two(at.getMinutes())}`;
}

/** An option's value as it is written on a command line. */
export function optionText(value) {
  return value === null ? "null" : typeof value === "object" ? JSON.stringify(value) : String(value);
}

/** A test for names: a regular expression, or a plain part if it is not one. */
export function matcher(pattern) {
  try {
    const expression = new RegExp(pattern, "i");
    return (text) => expression.test(text);
  } catch {
    return (text) => text.toLowerCase().includes(pattern.toLowerCase());
  }
}

export function Status({ status }) {
  return html`<span class=${`status ${status}`}>${status}</span>`;
}

/** An error, or a note that something is being loaded. */
export function Waiting({ error }) {
  return error
    ? html`<p class="problem" role="alert">${error}</p>`
    : html`<p class="muted" role="status">Loading …</p>`;
}

/** A field that filters. hasKey: the key `/` moves there. */
export function Search({ label, value, onChange, hasKey = false }) {
  const field = useRef(null);
  useEffect(() => {
    if (!hasKey) return undefined;
    const pressed = (event) => {
      const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
      if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey && !event.altKey) {
        event.preventDefault();
        field.current?.focus();
      }
    };
    addEventListener("keydown", pressed);
    return () => removeEventListener("keydown", pressed);
  }, []);
  const escape = (event) => {
    if (event.key === "Escape") {
      onChange("");
      event.target.blur();
    }
  };
  return html`<input
    type="search"
    ref=${field}
    value=${value}
    aria-label=${label}
    placeholder=${label}
    onInput=${(event) => onChange(event.target.value)}
    onKeyDown=${escape}
  />`;
}

/** Links to the same data for programs. */
export function Downloads({ path, parameters, csv = false }) {
  return html`<span class="downloads">
    <a href=${address(`api/${path}`, parameters)}>JSON</a>
    ${csv && html` <a href=${address(`api/${path}`, { ...parameters, as: "csv" })} download=${`${path}.csv`}>CSV</a>`}
  </span>`;
}

const compare = (left, right) => {
  if (left == null || right == null) return (left == null) - (right == null);
  return typeof left === "number" && typeof right === "number"
    ? left - right
    : String(left).localeCompare(String(right));
};

/** A table that is sorted by the heading that was chosen. columns: name, heading, cell(row), and numeric. */
export function SortedTable({ columns, rows, caption, start = null, sort, onSort }) {
  const [own, setOwn] = useState(start ?? "");
  const chosen = sort ?? own;
  const setSort = onSort ?? setOwn;
  const name = chosen.replace(/^-/, "");
  const down = chosen.startsWith("-");
  const sorted = useMemo(() => {
    if (!name) return rows;
    const ordered = [...rows].sort((left, right) => compare(left[name], right[name]));
    return down ? ordered.reverse() : ordered;
  }, [rows, name, down]);
  const heading = (column) => {
    const mark = column.name === name ? (down ? " ▾" : " ▴") : "";
    const next = column.name === name && !down ? `-${column.name}` : column.name;
    return html`<th
      scope="col"
      class=${column.numeric ? "number" : ""}
      aria-sort=${column.name === name ? (down ? "descending" : "ascending") : null}
    >
      ${
        column.sortable === false
          ? column.heading
          : html`<button class="plain" onClick=${() => setSort(next)}>${column.heading}${mark}</button>`
      }
    </th>`;
  };
  return html`<div class="scroll" tabindex="0" role="region" aria-label=${caption}>
    <table>
      <thead>
        <tr>
          ${columns.map(heading)}
        </tr>
      </thead>
      <tbody>
        ${sorted.map(
          (row) =>
            html`<tr key=${row.key}>
              ${columns.map(
                (column) =>
                  html`<td class=${column.numeric ? "number" : ""}>
                    ${column.cell ? column.cell(row) : column.numeric ? number(row[column.name]) : row[column.name]}
                  </td>`,
              )}
            </tr>`,
        )}
      </tbody>
    </table>
  </div>`;
}
