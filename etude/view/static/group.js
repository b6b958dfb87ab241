// The page of one group: the rollouts of a task beside each other, aligned by their common beginning.

import { Downloads, Status, Waiting, address, html, number, useMemo, useParameters, useQuery } from "./base.js";
import { Facts, LongText, rewardFacts, stepLink } from "./rollout.js";
import { visible } from "./tokens.js";

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

function Answer({ rollout, text, common, run, best }) {
  const attempt = rollout.attempts.at(-1);
  const turns = attempt?.turns ?? [];
  const facts = [
    ...rewardFacts(attempt),
    ["sampled tokens", number(turns.reduce((sum, turn) => sum + turn.tokens, 0))],
    ["turns", turns.length > 1 ? turns.length : ""],
    ["attempts", rollout.attempts.length > 1 ? rollout.attempts.length : ""],
    ["ended by", turns.at(-1)?.finish],
  ];
  const mark = best ? "the others begin to differ here" : "differs from the first answer here";
  return html`<article class="answer">
    <h3>
      <a href=${address("rollout", { run, rollout: rollout.rollout })}>rollout ${rollout.rollout}</a> ${" "}
      <${Status} status=${rollout.status} />
    </h3>
    <${Facts} facts=${facts} />
    ${rollout.why && html`<p class="muted fate">${visible(rollout.why)}</p>`}
    ${
      text === undefined
        ? html`<p class="muted">There is no answer.</p>`
        : html`<pre class="said"><span class="context">${visible(text.slice(0, common))}</span>${
            common < text.length && html`<mark title=${mark}>${visible(text.slice(common, common + 1))}</mark>`
          }${visible(text.slice(common + 1))}</pre>`
    }
    ${turns.length > 1 && html`<p class="muted">${turns.length - 1} more turns are on the rollout's page.</p>`}
  </article>`;
}

export function GroupPage() {
  const [{ run = "", task = "" }] = useParameters();
  const { record: page, error } = useQuery("group", { run, task });
  const texts = useMemo(() => (page ? page.rollouts.map(firstAnswer) : []), [page]);
  const common = useMemo(() => commonBeginnings(texts), [texts]);
  if (!page) return html`<main><${Waiting} error=${error} /></main>`;
  const rewards = page.rollouts.map(({ reward }) => reward).filter((reward) => reward != null);
  const mean = rewards.length ? rewards.reduce((sum, reward) => sum + reward, 0) / rewards.length : null;
  const level = rewards.length > 1 && Math.min(...rewards) === Math.max(...rewards);
  return html`<main>
    <h1>Group of task ${page.task}</h1>
    <${Facts}
      facts=${[
        ["step", stepLink(run, page.step)],
        ["source", visible(page.source)],
        ["row of the data", page.row],
        ["rollouts", page.rollouts.length],
        ["mean reward", number(mean)],
        ["common first tokens", page.rollouts.length > 1 ? number(page.common) : ""],
      ]}
    />
    ${page.cause && html`<p class="fate">Step ${page.step} dropped this group: ${visible(page.cause)}.</p>`}
    ${level && html`<p class="muted">All rewards of this group are equal.</p>`}
    <article class="message">
      <h3>prompt</h3>
      <${LongText} text=${page.prompt} title="prompt" />
    </article>
    <section aria-label="answers">
      <h2>Answers, the best first</h2>
      <div class="answers scroll" tabindex="0" role="region" aria-label="answers">
        ${page.rollouts.map(
          (rollout, index) =>
            html`<${Answer}
              key=${rollout.rollout}
              rollout=${rollout}
              text=${texts[index]}
              common=${common[index]}
              run=${run}
              best=${index === 0}
            />`,
        )}
      </div>
    </section>
    <p class="tools muted">
      <span>for programs: this page</span> <${Downloads} path="group" parameters=${{ run, task }} />
    </p>
  </main>`;
}
