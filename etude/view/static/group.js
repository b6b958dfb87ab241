// The page of one group: the rollouts of a task beside each other, aligned by their common beginning.

import { compareLink, Facts, ForPrograms, rolloutLink, Section, Status, taskLink } from "./base.js";
import { useParameters, useQuery, Waiting } from "./base.js";
import { Replays } from "./replay.js";
import { Conversation, expectedFact, isOpen, rewardFacts, stepFact } from "./rollout.js";
import { mean, number, sum, visible } from "./text.js";
import { html, useMemo } from "./vendor/preact-htm.js";

/** What the rollouts of a group are for: `train`, or `val` for an evaluation, which has data of its own. */
export const useOf = ({ rollouts }) => rollouts[0]?.use ?? "train";
export const ROW_OF = { train: "row of the data", val: "row of the evaluation's data" };

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
  const first = mark && common < text.length && html`<mark title=${mark}>${part(common, common + 1)}</mark>`;
  const before = html`<span class="context">${part(0, common)}</span>`;
  return html`<pre class="said">${before}${first}${part(first ? common + 1 : common)}</pre>`;
}

/** The advantage of a rollout, and its numbers in a replay of its step. */
function replayFacts(replayed, rollout) {
  const at = (replayed.rollout ?? []).indexOf(rollout.rollout);
  const [own, other] = ["recorded", "changed"].map((side) => replayed[`advantage_${side}`]?.[at]);
  const facts = [["advantage", number(own ?? rollout.advantage)]];
  return other === own ? facts : [...facts, ["advantage with other options", number(other)]];
}

function answerFacts(rollout) {
  const attempt = rollout.attempts.at(-1);
  const turns = attempt?.turns ?? [];
  return [
    ...rewardFacts(attempt),
    ["sampled tokens", number(sum(turns.map((turn) => turn.tokens)))],
    ["turns", turns.length > 1 ? turns.length : ""],
    ["attempts", rollout.attempts.length > 1 ? rollout.attempts.length : ""],
    ["ended by", turns.at(-1)?.finish],
  ];
}

/** An answer, once for all rollouts that are equal in what is shown. */
function Answer({ same, text, common, mark, facts, run, best }) {
  const [rollout] = same;
  const turns = rollout.attempts.at(-1)?.turns ?? [];
  const ids = same.map(({ rollout }) => rollout);
  const link = (id, place) => (place ? [", ", rolloutLink(run, id)] : rolloutLink(run, id, `rollout ${id}`));
  return html`<article class="answer">
    <h3>${same.length > 1 && `${same.length}× `}${ids.map(link)} <${Status} status=${rollout.status} /></h3>
    ${rollout.rollout !== best && compareLink(run, best, "compare with the first", { b: rollout.rollout })}
    <${Facts} facts=${facts} />
    ${rollout.why && html`<p class="muted fate">${visible(rollout.why)}</p>`}
    <${AnswerText} text=${text} common=${common} mark=${mark} />
    ${turns.length > 1 && html`<p class="muted">${turns.length - 1} more turns are on the rollout's page.</p>`}
  </article>`;
}

/** The answers of groups, each group in a section. All are compared with the first answer. tokens: for the answers of
 * the last group, the first tokens that they share with it. */
export function Answers({ run, groups, titles, tokens = [] }) {
  const all = groups.flatMap((group) => group.rollouts);
  const texts = useMemo(() => all.map(firstAnswer), [groups[0], groups.at(-1)]);
  const common = useMemo(() => commonBeginnings(texts), [texts]);
  const answersOf = (group) => {
    const found = {};
    for (const [place, rollout] of group.rollouts.entries()) {
      const text = texts[all.indexOf(rollout)];
      const shares = group === groups.at(-1) && tokens.length ? number(tokens[place]) : "";
      const replayed = replayFacts(group.replayed, rollout);
      const facts = [...answerFacts(rollout), ...replayed, ["common first tokens", shares]];
      const rest = rollout.attempts.at(-1)?.turns.length > 1 ? rollout.rollout : "";
      const key = JSON.stringify([text, facts, rollout.status, rollout.why, rest]);
      found[key] = { text, facts, same: [...(found[key]?.same ?? []), rollout] };
    }
    return Object.values(found);
  };
  const answer = ({ text, facts, same }) => {
    const at = all.indexOf(same[0]);
    const begin = at === 0 ? "the others begin to differ here" : "differs from the first answer here";
    const mark = all.length > 1 ? begin : "";
    const shown = { run, text, facts, same, mark, common: common[at], best: all[0].rollout };
    return html`<${Answer} key=${same[0].rollout} ...${shown} />`;
  };
  return groups.map(
    (group, index) => html`<${Section} title=${titles[index]}>
      <div class="answers">${answersOf(group).map(answer)}</div>
    <//>`,
  );
}

export function GroupPage() {
  const [{ run = "", task = "" }] = useParameters();
  const { record: page, error } = useQuery("group", { run, task }, isOpen);
  if (!page) return html`<main><${Waiting} error=${error} /></main>`;
  const use = useOf(page);
  const isDropped = use === "train" && page.cause;
  const rewards = page.rollouts.map(({ reward }) => reward).filter((reward) => reward != null);
  const level = rewards.length > 1 && Math.min(...rewards) === Math.max(...rewards);
  const facts = [
    stepFact(run, page.step, use),
    ["source", visible(page.source)],
    [ROW_OF[use], html`${page.row}, ${taskLink(run, task, "over the run")}`],
    ["rollouts", page.rollouts.length],
    ["mean reward", number(mean(rewards))],
    expectedFact(page.fields),
    ["common first tokens", page.rollouts.length > 1 ? number(page.common) : ""],
  ];
  return html`<main>
    <h1>Group of task ${page.task}</h1>
    ${error && html`<${Waiting} error=${error} />`}
    <${Facts} facts=${facts} />
    ${isDropped && html`<p class="fate">Step ${page.step} dropped this group: ${visible(page.cause)}.</p>`}
    ${level && html`<p class="muted">All rewards of this group are equal.</p>`}
    ${!page.same_prompt && html`<p class="muted">The model saw other messages first in some of these rollouts.</p>`}
    <${Conversation} messages=${page.prompt} images=${page.images} pictures=${page.pictures} />
    <${Answers} run=${run} groups=${[page]} titles=${["Answers, the best first"]} />
    <${Replays} run=${run} replays=${page.replays} />
    <${ForPrograms} path="group" parameters=${{ run, task }} />
  </main>`;
}
