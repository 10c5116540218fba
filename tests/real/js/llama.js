// What the model server's log says about its work. Asking the server itself would keep it from noticing that the
// client of a call without a stream has gone.

import { readFileSync } from 'node:fs';
import { setTimeout as pause } from 'node:timers/promises';

/** More tokens than any test lets it write. */
export const ENDLESS = 20_000;

export const url = process.env.TIDEGATE_URL;
export const direct = url === process.env.LLAMA_URL;

const LAUNCH = /launch_slot_: id +\d+ \| task (\d+) \| processing task/g;
const RELEASE = /release: id +\d+ \| task (\d+) \| stop processing: n_tokens = (\d+)/g;

const log = () => readFileSync(process.env.LLAMA_LOG, 'utf8');

export async function until(condition, within, what) {
  for (const deadline = performance.now() + within; !condition(); await pause(10)) {
    if (performance.now() > deadline) throw new Error(`not within ${within} ms: ${what}`);
  }
}

/** Tasks that are launched from now on. */
export function work() {
  const before = new Set([...log().matchAll(LAUNCH)].map(([, task]) => task));
  const fresh = (pattern) => [...log().matchAll(pattern)].filter(([, task]) => !before.has(task));
  return {
    launched: () => fresh(LAUNCH).length,
    async started() {
      await until(() => fresh(LAUNCH).length > 0, 10_000, 'llama.cpp starts the call');
    },
    /** The call ended far from its end: not by itself. */
    async stopped() {
      await until(() => fresh(RELEASE).length > 0, 3_000, 'llama.cpp stops the call');
      for (const [, , tokens] of fresh(RELEASE)) {
        if (Number(tokens) > ENDLESS / 2) throw new Error(`ran on to ${tokens} tokens`);
      }
    },
  };
}

/** A fetch that counts. */
export function counted() {
  const statuses = [];
  const fetch = async (...request) => {
    const answer = await globalThis.fetch(...request);
    statuses.push(answer.status);
    return answer;
  };
  return { fetch, statuses };
}
