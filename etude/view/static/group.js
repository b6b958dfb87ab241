// The page of one group: the rollouts of a task beside each other, aligned by their common beginning.

import {
  Facts,
  ForPrograms,
  rolloutLink,
  Section,
  Status,
  stepLink,
  useParameters,
  useQuery,
  Waiting,
} from "./base.js";
import { isOpen, Message, rewardFacts } from "./rollout.js";
import { mean, number, sum, visible } from "./text.js";
import { html, useMemo } from "./vendor/preact-htm.js";

const firstAnswer = (rollout) => rollout.attempts.at(-1)?.turns[0]?.text;

/** The characters with which two texts begin alike. */
function shared(one, other) {
  const length = Math.min(one.length, other.length);
  let count = 0;
  while (count < length && one[count] === other[count]) count += 1;
  return count;
}

/** For each answer, the characters that it shares: with the first answer, and the first one with all others. */
function commonBeginnings(texts) {
  const [first, ...others] = texts;
  if (first === undefined) return texts.map(() => 0);
  const counts = others.map((text) => (text === undefined ? 0 : shared(first, text)));
  const known = counts.filter((_, index) => others[index] !== undefined);
  return [known.length ? Math.min(...known) : 0, ...counts];
}

function AnswerText({ text, common, mark }) {
  if (text === undefined) return html`<p class="muted">There is no answer.</p>`;
  const part = (from, to) => visible(text.slice(from, to));
  const first = common < text.length && html`<mark title=${mark}>${part(common, common + 1)}</mark>`;
  const before = html`<span class="context">${part(0, common)}</span>`;
  return html`<pre class="said">${before}${first}${part(common + 1)}</pre>`;
}

function Answer({ rollout, text, common, run, best }) {
  const attempt = rollout.attempts.at(-1);
  const turns = attempt?.turns ?? [];
  const facts = [
    ...rewardFacts(attempt),
    ["sampled tokens", number(sum(turns.map((turn) => turn.tokens)))],
    ["turns", turns.length > 1 ? turns.length : ""],
    ["attempts", rollout.attempts.length > 1 ? rollout.attempts.length : ""],
    ["ended by", turns.at(-1)?.finish],
  ];
  const mark = best ? "the others begin to differ here" : "differs from the first answer here";
  return html`<article class="answer">
    <h3>${rolloutLink(run, rollout.rollout, `rollout ${rollout.rollout}`)} <${Status} status=${rollout.status} /></h3>
    <${Facts} facts=${facts} />
    ${rollout.why && html`<p class="muted fate">${visible(rollout.why)}</p>`}
    <${AnswerText} text=${text} common=${common} mark=${mark} />
    ${turns.length > 1 && html`<p class="muted">${turns.length - 1} more turns are on the rollout's page.</p>`}
  </article>`;
}

export function GroupPage() {
  const [{ run = "", task = "" }] = useParameters();
  const { record: page, error } = useQuery("group", { run, task }, isOpen);
  const texts = useMemo(() => (page ? page.rollouts.map(firstAnswer) : []), [page]);
  const common = useMemo(() => commonBeginnings(texts), [texts]);
  if (!page) return html`<main><${Waiting} error=${error} /></main>`;
  const rewards = page.rollouts.map(({ reward }) => reward).filter((reward) => reward != null);
  const level = rewards.length > 1 && Math.min(...rewards) === Math.max(...rewards);
  const facts = [
    ["step", stepLink(run, page.step)],
    ["source", visible(page.source)],
    ["row of the data", page.row],
    ["rollouts", page.rollouts.length],
    ["mean reward", number(mean(rewards))],
    ["common first tokens", page.rollouts.length > 1 ? number(page.common) : ""],
  ];
  const answer = (rollout, index) => html`<${Answer} key=${rollout.rollout} rollout=${rollout} run=${run}
    text=${texts[index]} common=${common[index]} best=${index === 0} />`;
  return html`<main>
    <h1>Group of task ${page.task}</h1>
    <${Facts} facts=${facts} />
    ${page.cause && html`<p class="fate">Step ${page.step} dropped this group: ${visible(page.cause)}.</p>`}
    ${level && html`<p class="muted">All rewards of this group are equal.</p>`}
    <${Message} by="prompt" text=${page.prompt} />
    <${Section} title="Answers, the best first" label="answers">
      <div class="answers scroll" tabindex="0" role="region" aria-label="answers">${page.rollouts.map(answer)}</div>
    <//>
    <${ForPrograms} path="group" parameters=${{ run, task }} />
  </main>`;
}
