// Values as text, and texts made fit to be shown.

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
  return seconds ? new Date(1000 * seconds).toLocaleString("sv").slice(0, 16) : "";
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

/** A text with its control characters, and those that turn the direction of writing, as codes. */
export function visible(text) {
  // biome-ignore lint/suspicious/noControlCharactersInRegex: they are what is looked for
  return text.replace(/[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]/g, (found) => {
    const code = found.charCodeAt(0);
    return code < 256 ? `\\x${code.toString(16).padStart(2, "0")}` : `\\u${code.toString(16)}`;
  });
}

const MOST_COMPARED = 2_000_000;

/** Two texts as parts: each is a text, and true if the other text does not have it there. Words are compared; of texts
 * with very many, only the beginning and the end. */
export function differences(one, other) {
  const [left, right] = [one, other].map((text) => text.match(/\s+|[\p{L}\p{N}]+|[^\s\p{L}\p{N}]/gu) ?? []);
  const most = Math.min(left.length, right.length);
  let start = 0;
  while (start < most && left[start] === right[start]) start += 1;
  let end = 0;
  while (end < most - start && left.at(-1 - end) === right.at(-1 - end)) end += 1;
  const [rows, columns] = [left, right].map((words) => words.slice(start, words.length - end));
  const parts = [[], []];
  const add = (side, words, differs) => {
    const last = parts[side].at(-1);
    if (last?.[1] === differs) last[0] += words.join("");
    else if (words.length) parts[side].push([words.join(""), differs]);
  };
  for (const side of [0, 1]) add(side, left.slice(0, start), false);
  if (rows.length * columns.length > MOST_COMPARED) {
    add(0, rows, true);
    add(1, columns, true);
  } else alignWords(rows, columns, add);
  for (const side of [0, 1]) add(side, left.slice(left.length - end), false);
  return parts;
}

/** Add words by the longest sequence that both texts have. */
function alignWords(rows, columns, add) {
  const width = columns.length + 1;
  const lengths = new Uint32Array((rows.length + 1) * width);
  for (let row = rows.length - 1; row >= 0; row--) {
    for (let column = columns.length - 1; column >= 0; column--) {
      const at = row * width + column;
      const isSame = rows[row] === columns[column];
      lengths[at] = isSame ? lengths[at + width + 1] + 1 : Math.max(lengths[at + 1], lengths[at + width]);
    }
  }
  let [row, column] = [0, 0];
  while (row < rows.length || column < columns.length) {
    const at = row * width + column;
    if (row < rows.length && column < columns.length && rows[row] === columns[column]) {
      add(0, [rows[row++]], false);
      add(1, [columns[column++]], false);
    } else if (column >= columns.length || (row < rows.length && lengths[at + width] >= lengths[at + 1])) {
      add(0, [rows[row++]], true);
    } else add(1, [columns[column++]], true);
  }
}

export const sum = (values) => values.reduce((total, value) => total + (value ?? 0), 0);

export const mean = (values) => (values.length ? sum(values) / values.length : null);
