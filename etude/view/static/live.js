// The changes of the page's run, or of all runs: the server tells of them, or a clock if it cannot.

const POLL_MS = 5000;
const wakes = new Set();
const run = new URLSearchParams(location.search).get("run") ?? "";
let source = null;
let clock = 0;
let last = null;

function wakeAll() {
  for (const wake of wakes) wake();
}

/** Connect while a part of the page listens and the page can be seen. */
function connect() {
  const isNeeded = wakes.size > 0 && !document.hidden;
  if (isNeeded && !source) {
    source = new EventSource(`api/changes?${new URLSearchParams({ run })}`);
    source.onmessage = ({ data }) => {
      if (last !== null && data !== last) wakeAll();
      last = data;
    };
    source.onerror = () => {
      wakeAll(); // says that the server has ended
      if (source?.readyState === EventSource.CLOSED) clock = setInterval(wakeAll, POLL_MS);
    };
  } else if (!isNeeded && source) {
    source.close();
    clearInterval(clock);
    source = null;
  }
}

document.addEventListener("visibilitychange", connect);

/** Call `wake` after each change. Returns a function that ends it. */
export function listen(wake) {
  wakes.add(wake);
  setTimeout(connect);
  return () => {
    wakes.delete(wake);
    setTimeout(connect);
  };
}
